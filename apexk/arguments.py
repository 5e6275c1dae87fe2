"""What commands are given: numbers and lists as they are written, and a parser that then looks at all of it together. The standard library alone,
so that a bad word is refused at once."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from apexk.outputs import Written, apart

MOST = (1 << 31) - 1  # of any whole number: what the arrays that it sizes can be asked for
FREE = ("*", argparse.REMAINDER)  # number of arguments of what is text or a command: each word may come again


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
    """The type of a flag that wants names, comma-separated; a comma in parentheses is the name's own, as in `apex(evict=lru,cost=rates)`."""
    found = [word.strip() for word in re.split(r",(?![^(]*\))", text)]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}; wanted names, comma-separated")
    return found


class Parser(argparse.ArgumentParser):
    """Refuses, by ValueError, what no argument says alone: a list with an entry twice, which would be run twice, and outputs that would be
    written over each other or over an input."""

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        found = super().parse_args(args, namespace)
        written, read = [], []
        for name, nargs, value in _given(self, found):
            if isinstance(value, Written):
                written.append((name, value))
                continue
            values = value if isinstance(value, list) else [value]
            if isinstance(value, list) and nargs not in FREE:
                once(name, value)
            read += [(name, path) for one in values if isinstance(one, (str, Path)) for path in _paths(str(one))]
        apart(written, read)
        return found


def once(name: str, values: list) -> None:
    """ValueError where an entry of the list, or a file under two of its names, comes again."""
    seen = set()
    for value in values:
        same = os.path.realpath(value) if isinstance(value, (str, Path)) and os.path.exists(value) else value
        if same in seen:
            raise ValueError(f"{name} has {value} twice; wanted each once")
        seen.add(same)


def _given(parser: argparse.ArgumentParser, found: argparse.Namespace) -> Iterator[tuple[str, object, object]]:
    """(what a person calls it, number of arguments, value) of everything that was parsed, by the chosen verb's own parser too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from _given(action.choices[getattr(found, action.dest)], found)
        elif hasattr(found, action.dest):
            yield action.option_strings[-1] if action.option_strings else action.metavar or action.dest, action.nargs, getattr(found, action.dest)


def _paths(text: str) -> list[str]:
    """What may be the name of a file in a word: itself, and a value in a policy's parentheses."""
    return [text, *re.findall(r"[(,]\s*\w+=([^,()]+)", text)]
