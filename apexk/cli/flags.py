"""What verbs' flags share: paths of outputs, and how a model is run. Imports no torch, so that a bad word is refused at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from apexk import hardware
from apexk.config import ApexConfig

DTYPES = ("float32", "bfloat16", "float16")


def out_file(text: str) -> Path:
    """The type of a flag that names a file to write. Raises OSError where its folder does not exist, before anything has run."""
    path = Path(text)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; wanted a file to write")
    return path


def add_session_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `run`, `chat` and `serve` share."""
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, demo (default), or random:SHAPE")
    parser.add_argument("--layers", type=int, help="sparse layers of a random model (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: the model's own)")
    parser.add_argument("--policy", default="apex", help="see apexk policies (default: apex)")
    parser.add_argument("--pool", default="auto", help="expert slots per layer, a size such as 8GiB, or auto (default)")
    parser.add_argument("--device", default="virtual", help="virtual (modelled, default), cpu or cuda")
    parser.add_argument("--hardware", default="a6000-paper", help="hardware file of a virtual device (default: a6000-paper)")
    parser.add_argument("--threads", type=int, help="of the CPU kernels (default: all that this process may use)")
    parser.add_argument("--timeline", type=out_file, metavar="OUT", help="write a timeline.jsonl here")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that lies in the folder")


def config_of(args: argparse.Namespace) -> ApexConfig:
    """Raises ValueError for a flag that does not fit."""
    hardware.load(args.hardware)
    return ApexConfig(policy=args.policy, pool=args.pool, device=args.device, hardware=args.hardware, threads=args.threads, timeline=args.timeline)
