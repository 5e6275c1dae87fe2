"""`apexk demo`: the main job, shown."""

from __future__ import annotations

import argparse
import sys
import textwrap
from functools import partial
from pathlib import Path

from apexk.arguments import whole, words
from apexk.cli import DONE, FAILED
from apexk.config import ApexConfig
from apexk.outputs import out_file, out_folder, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=partial(out_folder, holds=("timeline.jsonl", "summary.json", "timeline.png")), default="out", help="folder for timeline.jsonl, summary.json, timeline.png (default: out)")
    parser.add_argument("--json", type=out_file, help="also write the result as JSON to this file")
    parser.add_argument("--seed", type=whole(0), default=0, help="draws the prompts (default: 0)")
    parser.add_argument("--pool", type=whole(0), default=12, help="expert slots per layer, 0..32 (default: 12)")
    parser.add_argument("--prompts", type=whole(), default=8, help="batch size (default: 8)")
    parser.add_argument("--tokens", type=whole(), default=48, help="new tokens a prompt (default: 48)")
    parser.add_argument("--policies", type=words, default="no_assign,sa_only,ea_only,apex", help="comma-separated; the last one's timeline is kept")
    parser.add_argument("--device", default="virtual", help="virtual (modelled, default) or cpu (every expert on the CPU, measured)")
    parser.add_argument("--hardware", default="a6000-paper", help="name or path of a hardware file (default: a6000-paper)")


def run(args: argparse.Namespace) -> int:
    for policy in args.policies:
        ApexConfig(policy=policy, pool=args.pool, device=args.device, hardware=args.hardware)  # refuses bad ones

    from apexk.demo.run import run as run_demo

    args.out.mkdir(parents=True, exist_ok=True)
    result = run_demo(args.out, seed=args.seed, pool=args.pool, prompts=args.prompts, new_tokens=args.tokens, policies=args.policies,
                      hardware=args.hardware, device=args.device, say=lambda text: print(f"demo: {text} ...", file=sys.stderr, flush=True))
    if args.json:
        write_json(args.json, result)
    print(show(result))
    written = [args.out / "timeline.jsonl", args.out / "summary.json", *_plot(args.out, result), *([args.json] if args.json else [])]
    print("written: " + ", ".join(str(path) for path in written))
    return DONE if result["tokens_identical"] else FAILED


def show(result: dict) -> str:
    """The result as a person reads it."""
    lines = []
    for item in result["continuations"]:
        text = " ".join((item["prompt"] + " >>" + item["continuation"]).split())
        lines.append(textwrap.shorten(text, 150, placeholder=" ..."))
    lines += ["", f"tokens identical: {result['identical_prompts']}/{result['prompts']} prompts, {result['tokens']} tokens ({result['dtype']})", ""]
    head = ["policy", "TPOT ms", "tokens/s", "CPU path ms", "GPU path ms", "exact", "speculative", "hit rate", "wasted"]
    table = [head]
    for name, row in result["policies"].items():
        table.append([name, *(_number(row[key], digits) for key, digits in (
            ("tpot_ms", 2), ("tokens_per_s", 1), ("cpu_path_ms", 2), ("gpu_path_ms", 2), ("exact", 0), ("speculative", 0),
            ("hit_rate", 3), ("wasted", 0)))])
    widths = [max(len(row[i]) for row in table) for i in range(len(head))]
    for row in table:
        lines.append("  ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]))
    lines += ["", f"decode steps; paths per layer; {result['times']}; pool of {result['pool']} slots per layer", ""]
    return "\n".join(lines)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _plot(out: Path, result: dict) -> list[Path]:
    try:
        from apexk.profiling.plot import layer_timeline
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print("demo: no timeline.png: it needs matplotlib (pip install 'apexk[plots]')", file=sys.stderr)
        return []
    layer_timeline(out / "timeline.jsonl", out / "timeline.png")
    return [out / "timeline.png"]
