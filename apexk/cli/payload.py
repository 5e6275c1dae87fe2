"""`apexk payload`: what copies of fewer bits, or a policy that defers experts, cost the trained model that ships with apexk, on text that it was not trained on."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from apexk.arguments import whole, words
from apexk.bench.named import DTYPES
from apexk.cli import DONE
from apexk.cli.progress import table
from apexk.outputs import out_file, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--payload", type=words, default="plain,int8,int4", help="comma-separated: plain, int8, int4 (default: all)")
    parser.add_argument("--policy", default="mira", help="who is copied when (default: mira, whose GPU runs every expert from a copy)")
    parser.add_argument("--pool", type=whole(0), default=12, help="expert slots per layer, 0..32 (default: 12)")
    parser.add_argument("--tokens", type=whole(2), default=2048, help="of held-out text (default: 2048)")
    parser.add_argument("--pass-tokens", type=whole(), default=256, help="tokens of a pass, 256 at most; 1: as in decode, where policies that defer experts do so (default: 256)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="also write every figure here")


def run(args: argparse.Namespace) -> int:
    from apexk.config import ApexConfig

    config = ApexConfig(policy=args.policy, pool=args.pool)
    for name in args.payload:
        ApexConfig(payload=name)
    import torch

    from apexk.demo.payload import measure

    rows = measure(config, args.payload, args.tokens, getattr(torch, args.dtype), lambda text: print(f"payload: {text} ...", file=sys.stderr, flush=True), args.pass_tokens)
    first = rows[0]
    lines = [["copies", "lossless", "bytes an expert", "perplexity", "change", "largest logit error", "mean", "other first choice"]]
    for row in rows:
        lines.append([row.payload, "yes" if row.lossless else "NO", "-" if row.copy_bytes is None else str(row.copy_bytes), f"{row.perplexity:.4f}",
                      f"{100 * (row.perplexity / first.perplexity - 1):+.3f} %", f"{row.largest_error:.2g}", f"{row.mean_error:.2g}", f"{100 * row.changed:.2f} %"])
    print(table(lines))
    print(f"\nthe trained model that ships with apexk, {args.dtype}, policy {args.policy}, pool {args.pool} slots a layer; {first.tokens} predictions of held-out text, "
          f"{args.pass_tokens} tokens a pass, against the unpatched model")
    if args.json:
        write_json(args.json, {"schema": "apexk.payload/1", "policy": args.policy, "pool": args.pool, "dtype": args.dtype, "pass_tokens": args.pass_tokens, "rows": [asdict(row) for row in rows]})
    return DONE
