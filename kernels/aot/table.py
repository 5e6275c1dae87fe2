"""What the gates share: how targets are asked for and how figures are printed."""

import argparse
from collections import Counter

from apexk.arguments import wholes

from .targets import TARGETS


def targets_of(text: str) -> list[int]:
    """The type of a flag that wants targets, comma-separated."""
    found = wholes()(text)
    unknown = [target for target in found if target not in TARGETS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown targets {unknown}; known: {', '.join(map(str, TARGETS))}")
    return found


def table(columns, rows) -> str:
    """Cells under their columns, in lines as narrow as they can be."""
    lines = [columns, *[tuple(map(str, r)) for r in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def counted(counter: Counter) -> str:
    """8x128 4x32: how often each."""
    return " ".join(f"{n}x{kind}" for kind, n in sorted(counter.items(), key=str)) or "-"
