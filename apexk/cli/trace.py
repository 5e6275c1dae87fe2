"""`apexk trace`: routing traces; each action has its own `--help`."""

from __future__ import annotations

import argparse
from pathlib import Path

from apexk.arguments import whole
from apexk.cli import DONE
from apexk.cli.progress import table
from apexk.outputs import out_file, picture_file, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    new = actions.add_parser("generate", help="a synthetic trace from a preset")
    new.add_argument("out", type=out_file, help="a .trace.npz")
    new.add_argument("--preset", default="mmlu-like", help="mmlu-like (default), sticky or diverse-tokens")
    new.add_argument("--model", default="qwen3_5", help="whose layers, experts and top-k: qwen3_5 (default), qwen3_next, glm_4_5_air")
    new.add_argument("--batch", type=whole(), default=16, help="tokens a step (default: 16)")
    new.add_argument("--steps", type=whole(), default=60, help="default: 60")
    new.add_argument("--seed", type=whole(0), default=0, help="default: 0")
    new.add_argument("--phase", default="decode", choices=("prefill", "decode"), help="what the steps count as (default: decode)")
    new.set_defaults(act=_generate)

    seen = actions.add_parser("stats", help="set sizes, skew, reuse and prediction recall, by layer")
    seen.add_argument("trace", help="a .trace.npz, or sample:NAME")
    seen.add_argument("--layers", action="store_true", help="a line per layer")
    seen.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")
    seen.add_argument("--plot", type=picture_file, metavar="PNG", help="draw them here")
    seen.set_defaults(act=_stats)

    popular = actions.add_parser("popularity", help="count a calibration trace for the first residents of every policy")
    popular.add_argument("trace", type=Path, help="a .trace.npz of the calibration split")
    popular.add_argument("out", type=out_file, help="a .json")
    popular.add_argument("--split", required=True, help="name of the split that the trace is of, e.g. train")
    popular.add_argument("--against", type=Path, metavar="TRACE", help="report the overlap with the trace that will be evaluated")
    popular.set_defaults(act=_popularity)

    taken = actions.add_parser("import", help="npz per request (vLLM, SGLang), JSON lines, or Parquet (FLAME-MoE layout)")
    taken.add_argument("files", type=Path, nargs="+", help="a .jsonl, a .parquet, or an .npz for each request")
    taken.add_argument("--out", type=out_file, required=True, help="a .trace.npz")
    taken.add_argument("--model", required=True, help="name of the model")
    taken.add_argument("--experts", type=whole(), required=True, help="routed experts a layer")
    taken.add_argument("--dataset", default="", help="name of the text that was routed")
    taken.add_argument("--licence", default="", help="licence of the source")
    taken.set_defaults(act=_import)

    heard = actions.add_parser("record", help="the routing of a swapped model while it generates")
    heard.add_argument("out", type=out_file, help="a .trace.npz")
    heard.add_argument("--model", type=Path, help="folder of a transformers checkpoint (default: the small model that ships)")
    heard.add_argument("--prompts", type=Path, metavar="TXT", help="one prompt a line (default: drawn from the model's held-out text)")
    heard.add_argument("--batch", type=whole(), default=8, help="prompts (default: 8)")
    heard.add_argument("--tokens", type=whole(), default=32, help="new tokens a prompt (default: 32)")
    heard.add_argument("--seed", type=whole(0), default=0, help="draws the prompts (default: 0)")
    heard.add_argument("--policy", default="apex", help="runs the model; predictions reach as far as it looks ahead: mira's two layers (default: apex, one)")
    heard.add_argument("--licence", default="", help="licence of the model and the text")
    heard.set_defaults(act=_record)

    given = actions.add_parser("export", help="to Parquet, one row per token and layer (needs pyarrow)")
    given.add_argument("trace", type=Path, help="a .trace.npz")
    given.add_argument("out", type=out_file, help="a .parquet")
    given.set_defaults(act=_export)


def run(args: argparse.Namespace) -> int:
    return args.act(args)


def _generate(args: argparse.Namespace) -> int:
    from apexk.sim import trace
    from apexk.sim.generate import MODELS, generate
    from apexk.sim.named import check_named

    check_named(machines=[], presets=[args.preset], model=args.model)
    made = generate(args.preset, shape=MODELS[args.model], batch=args.batch, steps=args.steps, seed=args.seed, phase=args.phase)
    print(f"{trace.write(made, args.out)}: {made.tokens} tokens, {made.layers} layers, top-{made.topk} of {made.experts}")
    return DONE


def _stats(args: argparse.Namespace) -> int:
    from apexk.sim import trace
    from apexk.sim.inspect import draw, stats

    found = stats(trace.read(args.trace))
    names = list(found["all"])
    lines = [["layer", *names]]
    for number, row in enumerate(found["layers"] if args.layers else ()):
        lines.append([str(number), *("-" if row[n] is None else f"{row[n]:.3f}" for n in names)])
    lines.append(["all", *("-" if found["all"][n] is None else f"{found['all'][n]:.3f}" for n in names)])
    print(f"{found['source']}: {found['model']}, {found['tokens']} tokens in {found['steps']} steps, top-{found['topk']} of {found['experts']}\n")
    print(table(lines))
    if args.json:
        write_json(args.json, found)
    if args.plot:
        draw(found, args.plot)
    return DONE


def _popularity(args: argparse.Namespace) -> int:
    from apexk.sim import popularity, trace

    counted = popularity.count(trace.read(args.trace), args.split)
    share = popularity.overlap(counted, trace.read(args.against)) if args.against else None
    popularity.write(counted, args.out)
    print(f"{args.out}: {counted.model}, split {counted.split}, {len(counted.counts)} layers of {len(counted.counts[0])} experts")
    if share is not None:
        print(f"overlap with {args.against}: {share:.1%} of its requests" + ("; the splits are not disjoint" if share else ""))
    return DONE


def _import(args: argparse.Namespace) -> int:
    from apexk.sim import importers, trace

    facts = {"model": args.model, "experts": args.experts, "dataset": args.dataset, "licence": args.licence}
    kind = args.files[0].suffix
    if kind == ".npz":
        made = importers.from_request_npz(args.files, **facts)
    elif len(args.files) > 1:
        raise ValueError(f"{len(args.files)} files: only .npz files, one per request, are imported together")
    elif kind == ".jsonl":
        made = importers.from_jsonl(args.files[0], **facts)
    elif kind == ".parquet":
        made = importers.from_parquet(args.files[0], **facts)
    else:
        raise ValueError(f"{args.files[0]}: there are importers for .npz, .jsonl and .parquet")
    print(f"{trace.write(made, args.out)}: {made.tokens} tokens, {made.layers} layers, top-{made.topk} of {made.experts}")
    return DONE


def _record(args: argparse.Namespace) -> int:
    import apexk

    config = apexk.ApexConfig(policy=args.policy)  # a bad one is refused before torch is loaded
    if args.model and not args.prompts:
        raise ValueError(f"--model is {args.model}, whose text nobody knows: --prompts is missing, a file with one prompt a line")
    from apexk.bench.named import check_model
    from apexk.bench.prompts import read_prompts

    check_model(str(args.model or "demo"))
    texts = read_prompts(args.prompts)[: args.batch] if args.prompts else None

    from apexk.bench.source import open_model
    from apexk.demo import model as demo
    from apexk.sim import trace
    from apexk.sim.record import Recorder

    texts = texts or demo.prompts(args.batch, seed=args.seed)
    source = open_model(str(args.model or "demo"))
    if source.tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer: it takes no text")
    model, tokenizer = source.model, source.tokenizer
    with apexk.swap(model, config) as handle:
        recorder = Recorder(len(texts), handle.engine.shape.experts, str(args.model or "apexk demo"))
        handle.engine.recorder = recorder
        demo.generate(model, tokenizer, texts, args.tokens)
    made = recorder.trace(dataset=str(args.prompts or f"held-out text, seed {args.seed}"), licence=args.licence)
    print(f"{trace.write(made, args.out)}: {made.tokens} tokens, {made.layers} layers, top-{made.topk} of {made.experts}")
    return DONE


def _export(args: argparse.Namespace) -> int:
    from apexk.sim import importers, trace

    importers.to_parquet(trace.read(args.trace), args.out)
    print(f"{args.out}: written")
    return DONE
