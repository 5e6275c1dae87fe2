"""`apexk run`: text from a swapped model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from apexk.arguments import positive, whole
from apexk.cli import DONE
from apexk.cli.flags import add_session_arguments, config_of
from apexk.cli.progress import told
from apexk.outputs import out_file, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="prompts; - reads one a line from stdin (default without --file)")
    parser.add_argument("--file", type=Path, help="prompts: .txt, .jsonl, .csv or .parquet, MMLU's layouts included")
    add_session_arguments(parser)
    parser.add_argument("--tokens", type=whole(), default=64, help="new tokens a prompt (default: 64)")
    parser.add_argument("--batch", type=whole(), default=8, help="prompts at once (default: 8)")
    parser.add_argument("--chat", action="store_true", help="use the model's chat template")
    parser.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    parser.add_argument("--temperature", type=positive, help="with --sample (default: 1.0)")
    parser.add_argument("--seed", type=whole(0), default=0, help="with --sample (default: 0)")
    parser.add_argument("--trace", type=out_file, metavar="OUT", help="record the routing into a .trace.npz")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write prompts, answers and sums here")


def run(args: argparse.Namespace) -> int:
    if args.temperature is not None and not args.sample:
        raise ValueError("--temperature came without --sample: the likeliest token has none")
    config = config_of(args)
    prompts = _prompts(args)
    if args.trace and len(prompts) > args.batch:
        raise ValueError(f"--trace records one batch, but there are {len(prompts)} prompts and a --batch of {args.batch}")

    import torch

    from apexk.bench.session import open_session

    how = {"do_sample": True, "temperature": args.temperature or 1.0} if args.sample else {"do_sample": False}
    torch.manual_seed(args.seed)
    session = open_session(args.model, config, dtype=args.dtype, layers=args.layers, trust_remote_code=args.trust_remote_code)
    recorder = _record(args, session, prompts)
    only_shown = sys.stdout is not None and not (args.timeline or args.trace or args.json)
    with session.handle as handle:
        texts, answers = session.texts(prompts, args.chat), []
        if len(texts) == 1:
            pieces = []
            for piece in session.stream(texts[0], args.tokens, **how):
                print(piece, end="", flush=True)
                pieces.append(piece)
                if only_shown and sys.stdout.unheard:
                    break
            print()
            answers.append("".join(pieces))
        for start in range(0, len(texts) if len(texts) > 1 else 0, args.batch):
            if only_shown and sys.stdout.unheard:
                break
            found = session.generate(texts[start : start + args.batch], args.tokens, **how)
            answers += found
            for prompt, answer in zip(prompts[start:], found, strict=False):
                print(f"{prompt} >>{answer}\n")
        summary, info = handle.summary(), handle.info()
    print(f"run: {told(summary['decode'], info)}", file=sys.stderr)
    if recorder is not None:
        from apexk.sim import trace

        print(f"run: {trace.write(recorder.trace(dataset='apexk run'), args.trace)}", file=sys.stderr)
    if args.json:
        result = {"prompts": prompts, "answers": answers, "summary": summary, "info": info}
        write_json(args.json, result)
    return DONE


def _prompts(args: argparse.Namespace) -> list[str]:
    from apexk.bench.prompts import read_prompts

    if args.file and args.prompt:
        raise ValueError("prompts came as arguments and as --file; wanted one of them")
    if args.file:
        return read_prompts(args.file)
    if args.prompt and args.prompt != ["-"]:
        found = args.prompt
    else:
        found = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not found or not all(prompt.strip() for prompt in found):
        raise ValueError("a prompt is empty; wanted text as an argument, in --file or on stdin")
    return found


def _record(args: argparse.Namespace, session, prompts: list[str]):
    if args.trace is None:
        return None
    from apexk.sim.record import Recorder

    session.handle.engine.recorder = recorder = Recorder(len(prompts), session.handle.engine.shape.experts, session.source.name)
    return recorder
