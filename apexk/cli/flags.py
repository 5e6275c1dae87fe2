"""What verbs' flags share: numbers, and how a model is run. Imports no torch, so that a bad word is refused at once."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from apexk import hardware
from apexk.config import MOST, ApexConfig
from apexk.outputs import out_file

DTYPES = ("float32", "bfloat16", "float16")


def whole(least: int = 1) -> Callable[[str], int]:
    """The type of a flag that wants a whole number of at least `least`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= MOST:
            raise argparse.ArgumentTypeError(f"{text!r}; wanted a whole number from {least} to {MOST}")
        return value

    return number


def wholes(least: int = 1) -> Callable[[str], list[int]]:
    """The type of a flag that wants such numbers, comma-separated."""
    return lambda text: [whole(least)(word) for word in text.split(",")]


def positive(text: str) -> float:
    """The type of a flag that wants a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted a number above 0")
    return value


def words(text: str) -> list[str]:
    """The type of a flag that wants names, comma-separated."""
    found = [word.strip() for word in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}; wanted names, comma-separated")
    return found


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


def config_of(args: argparse.Namespace) -> ApexConfig:
    """Raises ValueError for a flag that does not fit."""
    hardware.load(args.hardware)
    return ApexConfig(policy=args.policy, pool=args.pool, device=args.device, dense=args.dense, hardware=args.hardware, threads=args.threads, timeline=args.timeline)
