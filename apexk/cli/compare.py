"""`apexk compare`: the systems of the field on one engine: a prompt each, then decode, over traces and modelled machines."""

from __future__ import annotations

import argparse
import itertools
import os
import sys

from apexk.arguments import whole, wholes, words
from apexk.cli import DONE
from apexk.cli.progress import bar
from apexk.outputs import out_file, picture_file, write_json, write_text, writing
from apexk.sim.named import check_named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--systems", type=words, default="all", help="all (default), or comma-separated names; any policy can be named as apexk simulate does")
    parser.add_argument("--trace", action="append", default=[], metavar="PATH", help="a .trace.npz or sample:NAME in place of the presets; may be given again")
    parser.add_argument("--preset", type=words, default="mmlu-like,sticky,diverse-tokens", help="comma-separated generator presets (default: %(default)s)")
    parser.add_argument("--model", default="qwen3_5", help="qwen3_5, qwen3_next, glm_4_5_air (default: qwen3_5); costs scale with another model's expert bytes")
    parser.add_argument("--hardware", type=words, default="a6000-paper,pinned-link-c0.3", help="comma-separated names or paths (default: %(default)s)")
    parser.add_argument("--pool", type=wholes(0), default="64", help="comma-separated slots a layer (default: 64)")
    parser.add_argument("--batch", type=whole(), default=16, help="requests (default: 16)")
    parser.add_argument("--prompt", type=whole(), default=64, help="tokens of each one's prompt (default: 64)")
    parser.add_argument("--steps", type=whole(), default=40, help="decode steps after it (default: 40)")
    parser.add_argument("--seeds", type=wholes(0), default="0,1,2", help="comma-separated (default: 0,1,2)")
    parser.add_argument("--jobs", type=whole(), default=min(2, os.cpu_count() or 1), help="processes (default: up to 2)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")
    parser.add_argument("--csv", type=out_file, metavar="OUT", help="also write a line a row here")
    parser.add_argument("--picture", type=picture_file, metavar="OUT.png", help="also draw it; needs matplotlib")
    parser.add_argument("--page", type=out_file, metavar="OUT.md", help="also write a page with a line a system on where it does best and why")


def run(args: argparse.Namespace) -> int:
    from apexk.compare.systems import chosen

    systems = chosen(args.systems)
    check_named(machines=args.hardware, traces=args.trace, presets=args.preset, model=args.model)

    from apexk.compare import report
    from apexk.compare.measure import Place, compare
    from apexk.compare.workload import Workload

    sizes = {"batch": args.batch, "prompt": args.prompt, "steps": args.steps}
    works = [Workload(path=path, prompt=args.prompt) for path in args.trace] or [Workload(preset, args.model, **sizes) for preset in args.preset]
    places = [Place(work, machine, pool, args.model != "qwen3_5") for work, machine, pool in itertools.product(works, args.hardware, args.pool)]
    show = bar("compare")

    def said(done: int, runs: int) -> None:
        if done == 1:
            print(f"compare: {runs} runs, the table comes after the last", file=sys.stderr)
        show(done, runs)

    rows = compare(systems, places, args.seeds, jobs=args.jobs, said=said)
    print(report.as_text(rows))
    command = command_of(args, systems)
    if args.json:
        write_json(args.json, report.as_json(rows, command))
    if args.csv:
        with writing(args.csv) as part:
            report.write_csv(rows, part)
    if args.picture:
        from apexk.compare.draw import draw

        draw(rows, args.picture)
    if args.page:
        from apexk.compare.page import write

        write_text(args.page, write(rows, command, args.picture.name if args.picture else None))
    return DONE


def command_of(args: argparse.Namespace, systems) -> str:
    """What repeats the table: every flag that it rests on."""

    def joined(value) -> str:
        return value if isinstance(value, str) else ",".join(map(str, value))

    names = ",".join(system.name for system in systems)  # "all" grows
    words = ["apexk compare", f"--systems '{names}'" if "(" in names else f"--systems {names}"]
    if args.trace:
        words += [f"--trace {path}" for path in args.trace]
    else:
        words += [f"--preset {joined(args.preset)}", f"--model {args.model}", f"--batch {args.batch}", f"--steps {args.steps}", f"--seeds {joined(args.seeds)}"]
    return " ".join([*words, f"--prompt {args.prompt}", f"--hardware {joined(args.hardware)}", f"--pool {joined(args.pool)}"])
