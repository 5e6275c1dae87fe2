"""The flags that say how a model is run. Imports no torch, so that a bad word is refused at once."""

from __future__ import annotations

import argparse

from apexk.arguments import whole
from apexk.bench.named import DTYPES, check_model
from apexk.config import ApexConfig
from apexk.outputs import out_file
from apexk.store.capacity import parse


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `run`, `chat` and `serve` share."""
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, demo (default), or random:SHAPE")
    parser.add_argument("--layers", type=whole(), help="sparse layers of a random model (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the model's own)")
    parser.add_argument("--policy", default="apex", help="see apexk policies (default: apex)")
    parser.add_argument("--pool", default="auto", help="expert slots per layer, a size such as 8GiB, or auto (default)")
    parser.add_argument("--device", default="virtual", help="virtual (modelled, default), cpu or cuda")
    parser.add_argument("--dense", default="kernels", help="with device cpu, 16-bit linear layers outside the experts: kernels (default) or torch")
    parser.add_argument("--hardware", default="a6000-paper", help="hardware file of a virtual device (default: a6000-paper)")
    parser.add_argument("--threads", type=whole(), help="of the CPU kernels (default: all that this process may use)")
    parser.add_argument("--timeline", type=out_file, metavar="OUT", help="write a timeline.jsonl here")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that lies in the folder")


def memory(text: str) -> int:
    """The type of a flag that wants bytes with a unit."""
    try:
        found = parse(text).bytes
    except ValueError:  # which would speak of a pool
        found = None
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted bytes with a unit, such as 48GiB")
    return found


def config_of(args: argparse.Namespace) -> ApexConfig:
    """Raises ValueError or FileNotFoundError for a flag that does not fit, the model's among them."""
    check_model(args.model, dtype=args.dtype, layers=args.layers)
    return ApexConfig(policy=args.policy, pool=args.pool, device=args.device, dense=args.dense, hardware=args.hardware, threads=args.threads, timeline=args.timeline)
