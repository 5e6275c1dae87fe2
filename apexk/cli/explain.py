"""`apexk explain`: why a layer was decided as it was."""

from __future__ import annotations

import argparse
from pathlib import Path

from apexk import hardware
from apexk.arguments import whole
from apexk.cli import DONE
from apexk.cli.progress import bar
from apexk.outputs import out_file, write_json
from apexk.sim.named import check_named
from apexk.timeline import read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeline", type=Path, help="a timeline.jsonl of a run")
    parser.add_argument("--trace", help="or a .trace.npz, which is simulated up to the step")
    parser.add_argument("--preset", default="mmlu-like", help="or a generated trace (default: mmlu-like)")
    parser.add_argument("--batch", type=whole(), default=16, help="tokens a step of the generated trace (default: 16)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the generated trace (default: 0)")
    parser.add_argument("--policy", default="apex", help="of the simulation, see apexk policies (default: apex)")
    parser.add_argument("--pool", type=whole(0), default=64, help="slots a layer of the simulation (default: 64)")
    parser.add_argument("--hardware", help="name or path of a hardware file (default: the timeline's, else a6000-paper)")
    parser.add_argument("--step", type=whole(0), required=True, help="which step, from 0")
    parser.add_argument("--layer", type=whole(0), required=True, help="which MoE layer of it, from 0")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write it here")


def run(args: argparse.Namespace) -> int:
    if args.timeline and args.trace:
        raise ValueError(f"--timeline is {args.timeline} and --trace is {args.trace}: a decision is of one of them")
    check_named(machines=[args.hardware] if args.hardware else [], policies=[args.policy], traces=[args.trace] if args.trace else [], presets=[args.preset])
    if args.timeline:
        recording = read(args.timeline)
        named = args.hardware or recording.header["hardware"]
        rows, machine = recording.rows, hardware.load(named) if args.hardware or named in hardware.names() else None
    else:
        machine = hardware.load(args.hardware or "a6000-paper")
        rows = _simulated(args, machine)

    from apexk.sim.explain import explain, show

    found = explain(rows, args.step, args.layer, machine)
    print(show(found))
    if args.json:
        write_json(args.json, found)
    return DONE


def _simulated(args: argparse.Namespace, machine) -> list[dict]:
    from dataclasses import replace

    from apexk.sim.cells import TraceSpec, demand
    from apexk.sim.run import simulate
    from apexk.timeline.writer import Timeline

    spec = TraceSpec(path=args.trace, steps=0) if args.trace else TraceSpec(args.preset, batch=args.batch, seed=args.seed, steps=args.step + 1)
    given = demand(spec)
    timeline, said = Timeline(None, keep=True), bar("explain")
    simulate(replace(given, steps=given.steps[: args.step + 1]), machine, args.policy, args.pool, warmup=0, timeline=timeline,
             watch=lambda _, step, layer: said(step + 1, args.step + 1) if layer + 1 == given.layers else None)
    return timeline.rows
