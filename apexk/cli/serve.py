"""`apexk serve`: the library's OpenAI-compatible server on a swapped model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from apexk.arguments import whole
from apexk.cli import FAILED, LACKING
from apexk.cli.flags import add_session_arguments, config_of
from apexk.inputs import reading

PLAIN_TEMPLATE = """{{ messages | map(attribute='content') | join('\n') }}{% if add_generation_prompt %}{{ '\n' }}{% endif %}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_session_arguments(parser)
    parser.add_argument("--host", default="localhost", help="address to listen on (default: localhost)")
    parser.add_argument("--port", type=whole(), default=8000, help="default: 8000")
    parser.add_argument("--continuous-batching", action="store_true", help="several requests at once: the library's continuous batching with paged attention")
    parser.add_argument("--chat-template", metavar="FILE|plain", help="for a model without one, which otherwise answers /v1/completions only: a Jinja file, or plain (messages one a line)")


def run(args: argparse.Namespace) -> int:
    if args.port > 65535:
        raise ValueError(f"--port is {args.port}; wanted 1..65535")
    config = config_of(args)
    template = PLAIN_TEMPLATE if args.chat_template == "plain" else None
    if args.chat_template and template is None:
        with reading(args.chat_template, "a Jinja template"):
            template = Path(args.chat_template).read_text(encoding="utf-8")

    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        print("apexk serve: the library's server needs more packages: pip install 'transformers[serving]'", file=sys.stderr)
        return LACKING
    from apexk.bench.serving import served
    from apexk.bench.session import open_session

    session = open_session(args.model, config, dtype=args.dtype, layers=args.layers, trust_remote_code=args.trust_remote_code)
    if template:
        session.source.tokenizer.chat_template = template
    with session.handle, served(session, host=args.host, port=args.port, continuous_batching=args.continuous_batching) as server:
        server.join()  # until a signal
    return FAILED
