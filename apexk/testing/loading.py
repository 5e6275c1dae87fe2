"""What loading a checkpoint costs: `python -m apexk.testing.loading` writes a random one and loads it in fresh processes.

A cold run drops the files from the page cache first (`disk_mib` is what it then really read); a warm one reads them
before. Measured are seconds and the growth of the peak resident memory from just before the load. `plain` is
`from_pretrained`, after which every parameter is read once, since its weights may still lie in the mapped file; `read` only
reads the files' bytes, the roof.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARMS = ("apexk", "plain", "read")
MIB = 1 << 20
THREADS = 4
#: format -> (one tensor a matrix, or fused over a layer's experts; hidden, intermediate, experts, layers for 768 MiB)
FORMATS = {
    "per-expert": (True, 1024, 512, 32, 8),
    "fused": (False, 1024, 512, 32, 8),
    "small-experts": (True, 256, 64, 128, 64),  # 24,576 tensors
}


def measure(arm: str, folder: Path, warm: bool) -> dict:
    """One load in this process. What has to be imported is, before the clock runs."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    import apexk

    load, config = apexk.load, apexk.ApexConfig(device="cpu")
    drop_cached(folder)
    if warm:
        read(folder)
    before, disk = _status("VmRSS"), _disk_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    began, handle, size = time.perf_counter(), None, 0
    if arm == "apexk":
        model, handle = load(folder, config, progress=False)
    elif arm == "plain":
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(torch.int16).max()
    else:
        read(folder)
    result = {"seconds": time.perf_counter() - began, "peak_growth_bytes": _status("VmHWM") - before, "disk_bytes": _disk_bytes() - disk}
    if arm != "read":
        size = sum(p.numel() * p.element_size() for p in model.parameters())
    if handle is not None:
        handle.restore()
    return result | {"parameter_bytes": size}


def read(folder: Path) -> None:
    """Every byte of the files once, several reads at a time, kept nowhere."""
    step = 8 * MIB
    files = {file: os.open(file, os.O_RDONLY) for file in sorted(folder.glob("*.safetensors"))}
    parts = [(descriptor, start) for file, descriptor in files.items() for start in range(0, file.stat().st_size, step)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda part: len(os.pread(part[0], step, part[1])), parts))
    for descriptor in files.values():
        os.close(descriptor)


def drop_cached(folder: Path) -> None:
    """Asks the system to forget what it keeps of the folder's files in memory."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def write(folder: Path, mib: int, form: str) -> None:
    """A random Qwen3-MoE in bfloat16 of about `mib` MiB of experts."""
    from transformers import Qwen3MoeConfig

    from apexk.testing.real import random_weights

    original, hidden, intermediate, experts, layers = FORMATS[form]
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=hidden, intermediate_size=1024, moe_intermediate_size=intermediate, num_hidden_layers=max(1, layers * mib // 768),
        num_experts=experts, num_experts_per_tok=4, num_attention_heads=8, num_key_value_heads=2, head_dim=hidden // 8, norm_topk_prob=True,
    )  # fmt: skip
    random_weights(config).save_pretrained(folder, save_original_format=original, max_shard_size="300MB")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m apexk.testing.loading", description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=768, help="MiB of experts (default: 768)")
    parser.add_argument("--repeats", type=int, default=3, help="loads an arm, in turns (default: 3)")
    parser.add_argument("--formats", default=",".join(FORMATS), help="on-disk formats (default: all)")
    parser.add_argument("--cache", default="cold,warm", help="state of the page cache (default: both)")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: a temporary folder)")
    parser.add_argument("--measure", nargs=3, metavar=("ARM", "FOLDER", "CACHE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.measure:
        print(json.dumps(measure(args.measure[0], Path(args.measure[1]), args.measure[2] == "warm")))
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        for form in args.formats.split(","):
            write(Path(scratch) / form, args.mib, form)
            for cache in args.cache.split(","):
                runs: dict[str, list[dict]] = {arm: [] for arm in ARMS}
                for _ in range(args.repeats):
                    for arm in ARMS:
                        runs[arm].append(_in_a_process(arm, Path(scratch) / form, cache))
                for arm, found in runs.items():
                    print(json.dumps({"format": form, "cache": cache, "arm": arm} | summary(found)), flush=True)
    return 0


def _in_a_process(arm: str, folder: Path, cache: str) -> dict:
    command = [sys.executable, "-m", "apexk.testing.loading", "--measure", arm, str(folder), cache]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: list[dict]) -> dict:
    row = {"median_s": round(statistics.median(r["seconds"] for r in runs), 2), "seconds": [round(r["seconds"], 2) for r in runs],
           "disk_mib": [round(r["disk_bytes"] / MIB) for r in runs]}
    if runs[0]["parameter_bytes"]:
        row["peak_growth"] = round(max(r["peak_growth_bytes"] / r["parameter_bytes"] for r in runs), 3)
        row["parameter_mib"] = round(runs[0]["parameter_bytes"] / MIB, 1)
    return row


if __name__ == "__main__":
    raise SystemExit(main())
