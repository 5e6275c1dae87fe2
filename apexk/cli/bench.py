"""`apexk bench`: time to first token, prefill and decode speed, apexk beside the plain library."""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
from dataclasses import replace
from pathlib import Path

from apexk.arguments import whole, wholes, words
from apexk.bench.named import check_model
from apexk.bench.plan import Plan, check_plain
from apexk.bench.prompts import read_prompts
from apexk.cli import DONE
from apexk.cli.progress import table
from apexk.config import ApexConfig
from apexk.outputs import out_file, write_json, writing

MODELLED = "modelled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, demo (default), or random:SHAPE such as random:qwen3.5-35b-a3b")
    parser.add_argument("--layers", type=whole(), help="sparse layers of a random model (default: all)")
    parser.add_argument("--vocabulary", type=whole(2), help="of a random model: a small one leaves the layers alone to be timed")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: the model's own)")
    parser.add_argument("--batch", type=wholes(), default="1", help="batch sizes, comma-separated (default: 1)")
    parser.add_argument("--prompt", type=wholes(), default="128", help="prompt lengths in tokens, comma-separated (default: 128)")
    parser.add_argument("--tokens", type=whole(0), default=32, help="decode steps (default: 32)")
    parser.add_argument("--repeats", type=whole(), default=3, help="turns; each runs every arm once after a warm-up (default: 3)")
    parser.add_argument("--beams", type=whole(), default=1, help="rows for each prompt, as in beam search (default: 1)")
    parser.add_argument("--throughput", action="store_true", help="double the batch until memory ends or nothing is gained")
    parser.add_argument("--workload", type=Path, help="prompts: .txt, .jsonl, .csv or .parquet, MMLU's layouts included, or a folder of them")
    parser.add_argument("--policies", type=words, default="apex", help="comma-separated (default: apex)")
    parser.add_argument("--pools", type=words, default="auto", help="expert slots per layer, comma-separated (default: auto)")
    parser.add_argument("--device", default="virtual", help="virtual (modelled, default), cpu or cuda")
    parser.add_argument("--dense", default="kernels", help="with device cpu, 16-bit linear layers outside the experts: kernels (default) or torch")
    parser.add_argument("--hardware", default="a6000-paper", help="hardware file of a virtual device (default: a6000-paper)")
    parser.add_argument("--plain", type=words, default=[], help="arms of the library alone, comma-separated: eager, batched_mm, grouped_mm, accelerate")
    parser.add_argument("--threads", type=whole(), help="of the CPU kernels and of torch (default: all that this process may use)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of random weights and random prompts (default: 0)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write everything here")
    parser.add_argument("--csv", type=out_file, metavar="OUT", help="also write the rows here")


def run(args: argparse.Namespace) -> int:
    plan = Plan(args.batch, args.prompt, args.tokens, args.repeats, args.beams, args.seed)
    policies, pools = args.policies, args.pools
    config = ApexConfig(device=args.device, dense=args.dense, hardware=args.hardware, threads=args.threads)
    for policy, pool in itertools.product(policies, pools):
        replace(config, policy=policy, pool=pool)  # refuses bad ones

    check_plain(args.plain)
    check_model(args.model, dtype=args.dtype, layers=args.layers, changed=args.vocabulary is not None)
    plan = replace(plan, prompts=read_prompts(args.workload)) if args.workload else plan

    import torch

    from apexk.bench.arms import arms
    from apexk.bench.bench import bench, throughput
    from apexk.bench.source import open_model

    def say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    chosen = arms(config, policies, pools, args.plain)
    if args.threads:
        torch.set_num_threads(args.threads)
    source = open_model(args.model, dtype=args.dtype, layers=args.layers, seed=args.seed,
                        changes={"vocab_size": args.vocabulary} if args.vocabulary else None)
    for arm in chosen:
        if not arm.missing:
            with arm.entered(source.model):  # what it refuses is told before anything is timed
                pass
    result = (throughput if args.throughput else bench)(source, chosen, plan, say)
    result["command"] = " ".join(["apexk", *sys.argv[1:]])
    if args.json:
        write_json(args.json, result)
    if args.csv:
        _write_csv(args.csv, result["rows"])
    print(show(result))
    return DONE


def show(result: dict) -> str:
    """The table, the ratio to the first plain arm of the same workload, and how to read it."""
    rows = [["batch", "prompt", "arm", "TTFT ms", "prefill tok/s", "TPOT ms", "p90", "decode tok/s", ""]]
    for row in result["rows"]:
        tpot = row["tpot_ms"] or {}
        note = MODELLED if row["modelled"] else "measured"
        rows.append([str(row["batch"]), str(row["prompt_length"]), row["arm"], _number(row["ttft_ms"]["p50"]), _number(row["prefill_tokens_per_s"]),
                     _number(tpot.get("p50")), _number(tpot.get("p90")), _number(row["decode_tokens_per_s"]), note + (", best batch" if row.get("best") else "")])
    lines = [table(rows), ""]
    modelled = sorted({row["hardware"] for row in result["rows"] if row["modelled"]})
    if modelled:
        lines.append(f"modelled: on hardware {', '.join(modelled)}, timed as if each expert were that file's; not measured")
    if result["random_weights"]:
        lines.append("random weights: routing is almost uniform, unlike a trained model's")
    lines += [f"{name}: left out, {why}" for name, why in result["skipped"].items()]
    lines.append(f"{result['model']}, {result['dtype']}, {result['repeats']} turns of all arms, {result['new_tokens']} steps, the same tokens for every arm; medians")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _write_csv(path: Path, rows: list[dict]) -> None:
    flat = []
    for row in rows:
        flat.append({name: value for name, value in row.items() if not isinstance(value, dict)}
                    | {f"{key}_{p}": v for key in ("ttft_ms", "tpot_ms") for p, v in (row[key] or {}).items()})
    names = list(dict.fromkeys(name for row in flat for name in row))
    with writing(path) as part, part.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, names)
        writer.writeheader()
        writer.writerows(flat)
