"""`apexk evictions`: what better eviction is worth, and how much of it each rule gets."""

from __future__ import annotations

import argparse

from apexk.arguments import whole, wholes, words
from apexk.cli import DONE
from apexk.cli.progress import table
from apexk.outputs import out_file, write_json
from apexk.sim.named import check_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", type=words, default="sticky,diverse-tokens,mmlu-like", help="comma-separated generator presets")
    parser.add_argument("--hardware", type=words, default="a6000-paper,pinned-link", help="comma-separated names or paths")
    parser.add_argument("--model", default="qwen3_5", help="qwen3_5, qwen3_next, glm_4_5_air (default: qwen3_5)")
    parser.add_argument("--layers", type=whole(), default=12, help="MoE layers to run (default: 12)")
    parser.add_argument("--batch", type=whole(), default=16, help="tokens a step (default: 16)")
    parser.add_argument("--pool", type=whole(), default=64, help="slots a layer (default: 64)")
    parser.add_argument("--steps", type=whole(), default=50, help="steps, 10 of warm-up included (default: 50)")
    parser.add_argument("--seeds", type=wholes(0), default="101,102", help="comma-separated (default: 101,102)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")


def run(args: argparse.Namespace) -> int:
    check_named(machines=args.hardware, presets=args.preset, model=args.model)

    from apexk.sim.evictions import study

    found = list(study(args.preset, args.hardware, args.seeds, model=args.model, layers=args.layers, batch=args.batch,
                       pool=args.pool, steps=args.steps))
    rules = list(found[0].ms)
    print(table([["trace", "hardware", "belady gains", *rules]] + [
        [s.preset, s.machine, f"{100 * s.gap:.1f} %", *(f"{100 * s.closed(rule):.0f} %" for rule in rules)] for s in found
    ]))  # fmt: skip
    print("\nmodelled; percent of the distance from `utility 0.9` to `belady`; `hidden` knows the generator's state, which no rule that sees routing can")
    if args.json:
        rows = [{"preset": s.preset, "hardware": s.machine, "ms": s.ms, "closed": {r: s.closed(r) for r in rules}} for s in found]
        write_json(args.json, {"schema": "apexk.evictions/1", "rows": rows})
    return DONE
