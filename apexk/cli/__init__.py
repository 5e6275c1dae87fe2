"""`apexk <verb>`: one file a verb, imported when it is asked for.

Tables go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 failed, 2 misuse, 3 needs something this machine
lacks, 130 interrupted, 128 and the signal's number ended by one.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import apexk
from apexk.arguments import Parser
from apexk.cli.progress import Stream
from apexk.outputs import misplaced, worded

#: verb -> what it does; the verb's module is `apexk.cli.<verb>` (`module`) with `add_arguments(parser)` and `run(args) -> int`
VERBS = {
    "demo": "generate with a small trained MoE, plain and swapped, and show the modelled timeline",
    "run": "generate text with a swapped model: prompts from arguments, a file or stdin",
    "chat": "talk with a swapped model in a terminal",
    "serve": "an OpenAI-compatible server: transformers serve with a swapped model",
    "bench": "time to first token, prefill and decode speed, apexk beside the plain library",
    "policies": "list the policies: source, lossless or not, what each may do",
    "simulate": "run policies over routing traces on modelled hardware, without a model",
    "compare": "the systems of the field on one engine: decode, prefill, what the GPU waits for",
    "evictions": "what better eviction is worth on generated traces, and how much of it each rule gets",
    "paper": "the Apex paper's figures and tables, ours beside the paper's",
    "explain": "why a layer was decided as it was: misses, estimates for each count, the choice, what was best",
    "trace": "generate, look at, import, convert and record routing traces",
    "train-predictor": "train a predictor of expert loads from routing traces, and judge it on steps that it was not trained on",
    "kernels": "benchmark the kernels, or compile them for GPUs that are not here",
    "report": "show a timeline or profile, or compare two: a table per layer, totals, findings, pictures, one HTML page",
    "overhead": "what apexk itself costs on this host: deciding, launching, hand-over, transfer set-up",
    "plan": "how FlexGen, MoE-Lightning and CoX-MoE would run a model: batches, and what lies where",
    "payload": "what copies of fewer bits, or deferred experts, cost a model: logit error and perplexity on held-out text",
    "fit": "whether and how a model fits this machine: memory, pool sizes, modelled speed; before a weight is read",
    "doctor": "what this machine and installation have: versions, kernels, memory, limits, GPU, settings with their sources",
    "profile": "capture a run with Nsight Systems or torch.profiler and report it layer by layer",
}
DONE, FAILED, MISUSE, LACKING, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: list[str] | None = None) -> int:
    """The verb's exit code. Nothing that a person can mistype, press or run out of ends in a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    asked = next((a for a in argv if not a.startswith("-")), None)
    with Stream.of_each():
        return _told(argv, asked)


def _told(argv: list[str], asked: str | None) -> int:
    try:
        with _ending_well():
            try:
                return _run(argv, asked)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # a full disk under it is told here, not by the interpreter's last breath
    except KeyboardInterrupt:
        return _ended(asked, "interrupted", INTERRUPTED)
    except Ended as error:
        return _ended(asked, f"ended by {signal.Signals(error.code - 128).name}", error.code)
    except (ValueError, TypeError) as error:  # bad input, already worded for a person
        return _ended(asked, error, MISUSE)
    except MemoryError as error:
        return _ended(asked, error, LACKING)
    except OSError as error:
        return _ended(asked, worded(error), MISUSE if misplaced(error) else FAILED)
    except ModuleNotFoundError as error:
        if (error.name or "apexk").startswith("apexk"):
            raise
        return _ended(asked, f"needs {error.name}, which is not installed: pip install {error.name}", LACKING)
    except ImportError as error:
        if error.name:  # the interpreter's own; those of libraries that are not built are worded for a person
            raise
        return _ended(asked, error, LACKING)
    except RuntimeError as error:
        if type(error).__name__ != "MissingDevice":  # by name: its module imports torch
            raise
        return _ended(asked, error, LACKING)


class Ended(SystemExit):
    """Raised where a signal finds the program; `code` is the exit code."""


@contextmanager
def _ending_well() -> Iterator[None]:
    """Signals that ask to end do so as an exception does, so that what is half written or lent is given back. Not where somebody else has a say."""

    def end(number, _frame):
        for one in heard:
            signal.signal(one, signal.SIG_IGN)  # the first is enough
        raise Ended(128 + number)

    here = threading.current_thread() is threading.main_thread()
    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(number) == signal.SIG_DFL]
    for number in heard:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def module(verb: str) -> ModuleType:
    """A verb's module; a hyphen in its name is an underscore there."""
    return importlib.import_module(f"apexk.cli.{verb.replace('-', '_')}")


def _run(argv: list[str], asked: str | None) -> int:
    parser = Parser(prog="apexk", description="Mixture-of-Experts inference with experts in host memory.")
    parser.add_argument("--version", action="version", version=f"apexk {apexk.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in VERBS.items():
        sub = verbs.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        if verb == asked:  # only the verb that is asked for is imported
            module(verb).add_arguments(sub)
    if not {"", os.getcwd()} & set(sys.path):  # a policy `module:Class` may lie in the folder at hand; last, so that it hides nothing
        sys.path.append("")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("apexk").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    args = parser.parse_args(argv)
    return module(asked).run(args)


def _ended(asked: str | None, why: object, code: int) -> int:
    print(f"apexk {asked}: {why}", file=sys.stderr)
    return code
