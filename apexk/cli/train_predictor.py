"""`apexk train-predictor`: predictors of expert loads, from routing traces."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path

from apexk.arguments import positive, whole
from apexk.cli import DONE
from apexk.cli.progress import table
from apexk.outputs import out_file, write_json

SHARE = 0.25  # held out where no trace is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", nargs="+", help="to train on: .trace.npz files of one model")
    parser.add_argument("--out", type=out_file, metavar="OUT", help="write the predictor here, an .npz (default: it is only judged)")
    parser.add_argument("--kind", choices=("linear", "recurrent"), default="linear",
                        help="linear: two layers ahead, for mira(predictor=OUT); recurrent: the next layer's loads, for replication(predictor=OUT) (default: linear)")
    parser.add_argument("--held-out", type=Path, metavar="TRACE", help="judge on this trace, of other prompts (default: on the last steps of the training traces, which are then not trained on)")
    parser.add_argument("--held-out-share", type=positive, default=SHARE, help=f"of each trace's steps, without --held-out (default: {SHARE})")
    parser.add_argument("--rank", type=whole(), default=64, help="of the linear kind's bottleneck (default: 64)")
    parser.add_argument("--rounds", type=whole(), default=600, help="training steps at most; it ends earlier once validation does not improve (default: 600)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the first weights and the order of steps (default: 0)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")


def run(args: argparse.Namespace) -> int:
    from apexk.policy import predictor
    from apexk.predictors.data import split
    from apexk.sim import trace

    if args.out and args.out.suffix != ".npz":
        raise ValueError(f"--out is {args.out}; the name must end in .npz")
    traces = [trace.read(path) for path in args.trace]
    train_steps, held_out = split(traces, trace.read(args.held_out) if args.held_out else None, args.held_out_share)
    from apexk.predictors.judge import judge
    from apexk.predictors.train import train

    made = train(args.kind, train_steps, str(traces[0].meta.get("model")), rank=args.rank, seed=args.seed, rounds=args.rounds,
                 say=lambda text: print(f"train-predictor: {text}", file=sys.stderr, flush=True))
    scores = judge(made, train_steps, held_out)
    if args.out:
        predictor.write(made, args.out)
    print(show(scores, args.kind, sum(map(len, train_steps)), sum(map(len, held_out)), made.meta["model"]))
    if not any(one.name.startswith("router") for one in scores):
        print(f"the traces hold no predictions {made.distance} layer(s) ahead, so neither does the predictor use them: `apexk trace record --policy mira` records both distances")
    if args.json:
        write_json(args.json, {"schema": "apexk.train-predictor/1", "meta": made.meta, "held_out_steps": sum(map(len, held_out)), "scores": [asdict(s) for s in scores]})
    return DONE


def show(scores, kind: str, trained: int, held_out: int, model: str) -> str:
    further = [("error", "load error", "{:.3f}"), ("precision", "overloaded: precision", "{:.3f}"), ("recall", "recall", "{:.3f}"), ("f1", "F1", "{:.3f}")] if kind == "recurrent" else []
    lines = [["predictor", "recall, experts", "recall, tokens", *(head for _, head, _ in further)]]
    for one in scores:
        values = [getattr(one, name) for name, _, _ in further]
        lines.append([one.name, f"{one.experts:.4f}", f"{one.tokens:.4f}", *("-" if math.isnan(v) else form.format(v) for v, (_, _, form) in zip(values, further, strict=True))])
    said = f"{model}: trained on {trained} steps, judged on {held_out} others; each names as many experts a layer as are active there"
    if kind == "recurrent":
        said += "; load error: mean |expected load - load| over the mean load; overloaded: above twice the mean of the active"
    return table(lines) + "\n\n" + said
