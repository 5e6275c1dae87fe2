"""`apexk chat`: a conversation in a terminal."""

from __future__ import annotations

import argparse
import re
import sys

from apexk.arguments import whole
from apexk.cli import DONE
from apexk.cli.flags import add_session_arguments, config_of
from apexk.cli.progress import told

HELP = "an empty line or Ctrl-D ends; /clear forgets the conversation; /stats tells what ran"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_session_arguments(parser)
    parser.add_argument("--tokens", type=whole(), default=256, help="new tokens an answer (default: 256)")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")


def run(args: argparse.Namespace) -> int:
    config = config_of(args)

    from apexk.bench.session import open_session

    session = open_session(args.model, config, dtype=args.dtype, layers=args.layers, trust_remote_code=args.trust_remote_code)
    templated = session.source.tokenizer is not None and session.source.tokenizer.chat_template is not None
    if not templated:
        print(f"chat: {session.source.name} has no chat template: each line is continued as it is", file=sys.stderr)
    print(f"chat: {HELP}", file=sys.stderr)
    first = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(first)
    with session.handle as handle:
        while (line := _ask()).strip():
            if line.strip() == "/clear":
                messages = list(first)
                continue
            if line.strip() == "/stats":
                print(f"chat: {told(handle.summary()['decode'], handle.info())}", file=sys.stderr)
                continue
            if re.fullmatch(r"/\w+", line.strip()):
                print(f"chat: no command {line.strip()}; {HELP}", file=sys.stderr)
                continue
            messages.append({"role": "user", "content": line})
            answer = ""
            try:
                for piece in session.stream(session.conversation(messages) if templated else line, args.tokens, do_sample=args.sample):
                    print(piece, end="", flush=True)
                    answer += piece
            except ValueError as error:  # too long for the context: the conversation goes on without this line
                print(f"chat: {error}", file=sys.stderr)
                messages.pop()
                continue
            except KeyboardInterrupt:
                print(" [stopped]", file=sys.stderr)
            print()
            messages.append({"role": "assistant", "content": answer})
    return DONE


def _ask() -> str:
    """A line, empty at the end. One that no terminal shows beside the answer is written before it: what is kept in a file reads as the terminal does."""
    typed, shown = sys.stdin.isatty(), sys.stdout is not None and sys.stdout.isatty()
    if typed and not shown:
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        line = input("> " if typed and shown else "")
    except EOFError:
        return ""
    if line.strip() and not (typed and shown):
        print(f"> {line}", flush=True)
    return line
