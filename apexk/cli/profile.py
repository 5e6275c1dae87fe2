"""`apexk profile`: capture a run for the per-layer report, with Nsight Systems where it is, else with torch.profiler."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

from apexk.arguments import whole
from apexk.bench.named import check_model
from apexk.cli import DONE, FAILED, LACKING
from apexk.config import ApexConfig
from apexk.outputs import out_folder

log = logging.getLogger("apexk.profile")
WARM_TOKENS = 4  # generated before the capture: compilers, caches and cost models settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=partial(out_folder, holds=("timeline.jsonl", "trace.json", "nsys.*")), default="out/profile", help="folder for what is written (default: out/profile)")
    parser.add_argument("--tool", choices=("auto", "nsys", "torch"), default="auto", help="auto: nsys if it is here and the device is cuda, else torch.profiler")
    parser.add_argument("--model", help="folder of a model (default: the demo's)")
    parser.add_argument("--policy", default="apex", help="default: apex")
    parser.add_argument("--pool", type=whole(0), help="expert slots per layer (default: a quarter of the experts)")
    parser.add_argument("--device", default=None, help="cuda where there is one, else virtual; cpu: every expert on the CPU")
    parser.add_argument("--hardware", default="a6000-paper", help="hardware file of a virtual device (default: a6000-paper)")
    parser.add_argument("--prompts", type=whole(), default=4, help="batch size (default: 4)")
    parser.add_argument("--tokens", type=whole(), default=16, help="new tokens in the capture (default: 16)")
    parser.add_argument("--dry-run", action="store_true", help="print what would run and stop")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the workload itself, under nsys
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="your own program under nsys instead; it calls torch.cuda.profiler.start and stop")


def run(args: argparse.Namespace) -> int:
    check_model(args.model or "demo")
    ApexConfig(policy=args.policy, pool=args.pool, device=args.device or "virtual", hardware=args.hardware)  # refuses bad ones
    if args.inside:
        return _workload(args, _CudaCapture())
    tool = _tool(args)
    if tool == "nsys":
        return _with_nsys(args)
    if args.command:
        print("torch.profiler cannot look into another program; install nsys, or leave the command out", file=sys.stderr)
        return LACKING
    if args.dry_run:
        print(f"torch.profiler: {WARM_TOKENS} tokens, then {args.tokens} in the capture; {args.out}/trace.json and timeline.jsonl, then apexk report of both")
        return DONE
    return _with_torch(args)


def _tool(args: argparse.Namespace) -> str:
    if args.tool != "auto":
        return args.tool
    here = shutil.which("nsys") is not None
    if args.command or (here and _device(args) == "cuda"):
        return "nsys"
    log.info("torch.profiler is used: %s", "the device is not cuda, so Nsight Systems would see no GPU work" if here else "nsys is not on PATH")
    return "torch"


def _device(args: argparse.Namespace) -> str:
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "virtual"
    return args.device


def _with_nsys(args: argparse.Namespace) -> int:
    from apexk.profiling import capture

    command = args.command
    if not command:
        given = {"out": args.out, "model": args.model, "policy": args.policy, "pool": args.pool, "device": _device(args), "hardware": args.hardware,
                 "prompts": args.prompts, "tokens": args.tokens}  # fmt: skip
        command = [sys.executable, "-m", "apexk.cli", "profile", "--inside", *(w for k, v in given.items() if v is not None for w in (f"--{k}", str(v)))]
    if importlib.util.find_spec("nvtx") is None:
        log.warning("nvtx is not installed: Nsight Systems will see no ranges of apexk (pip install nvtx)")
    code = capture.nsys(args.out / "nsys", command, dry_run=args.dry_run)
    if args.dry_run:
        print(f"apexk report {shlex.quote(str(args.out / 'nsys.sqlite'))}")
    return code if code or args.dry_run else _report(args, args.out / "nsys.sqlite")


def _with_torch(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    capture = _TorchCapture(args.out / "trace.json")
    return _workload(args, capture) or _report(args, args.out / "trace.json")


def _report(args: argparse.Namespace, profile: Path) -> int:
    """The profile's table, completed by the timeline where that is measured; of a modelled one, its own table."""
    from apexk.profiling.report import main

    timeline = args.out / "timeline.jsonl"
    modelled = args.device == "virtual"
    joined = ["--timeline", str(timeline)] if timeline.is_file() and not modelled and not args.command else []
    if not profile.is_file():  # the tool's failure, nobody's misuse
        print(f"apexk profile: the profiler wrote no {profile}", file=sys.stderr)
        return FAILED
    print(f"\n{profile}", flush=True)
    code = main([str(profile), *joined])
    if code or not modelled:
        return code
    print(f"\n{timeline}")
    return main([str(timeline)])


class _CudaCapture:
    """The range that nsys waits for; its own ranges reach it as NVTX."""

    def attach(self, handle) -> None:
        """Nothing: `swap` has put the ranges in place."""

    def __enter__(self):
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.start()

    def __exit__(self, *_):
        import torch

        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


class _TorchCapture:
    def __init__(self, path: Path):
        import torch
        from torch.profiler import ProfilerActivity, profile, supported_activities

        wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
        every_thread = torch.profiler._ExperimentalConfig(profile_all_threads=True)
        self.path, self.profiler = path, profile(activities=sorted(wanted, key=str), experimental_config=every_thread)

    def attach(self, handle) -> None:
        from apexk.device.ranged import RangedDevice, TorchRanges

        handle.engine.device = RangedDevice(handle.engine.device, TorchRanges(handle.engine.shape.layers))

    def __enter__(self):
        self.profiler.__enter__()

    def __exit__(self, *error):
        self.profiler.__exit__(*error)
        self.profiler.export_chrome_trace(str(self.path))


def _workload(args: argparse.Namespace, capture) -> int:
    """Prefill and decode of a swapped model, once to warm up and once in the capture."""
    import apexk
    from apexk.bench.source import open_model
    from apexk.demo import model as demo

    source = open_model(args.model or "demo")
    if source.tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer: it takes no text")
    model, tokenizer = source.model, source.tokenizer
    texts = demo.prompts(args.prompts)
    args.out.mkdir(parents=True, exist_ok=True)
    config = apexk.ApexConfig(policy=args.policy, pool=0 if _device(args) == "cpu" else args.pool, device=_device(args), hardware=args.hardware,
                              timeline=args.out / "timeline.jsonl")  # fmt: skip
    with apexk.swap(model, config) as handle:
        capture.attach(handle)
        demo.generate(model, tokenizer, texts, WARM_TOKENS)
        with capture:
            demo.generate(model, tokenizer, texts, args.tokens)
    return DONE
