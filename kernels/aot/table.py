"""What the gates share: how targets are asked for and how figures are printed."""

from collections import Counter

from .targets import TARGETS


def targets_of(text: str, parser) -> list[int]:
    """"80,90" as numbers; a target that is not known is a misuse, which `parser` tells of."""
    targets = [int(t) for t in text.split(",")]
    unknown = [t for t in targets if t not in TARGETS]
    if unknown:
        parser.error(f"unknown targets {unknown}; known: {', '.join(map(str, TARGETS))}")
    return targets


def table(columns, rows) -> str:
    """Cells under their columns, in lines as narrow as they can be."""
    lines = [columns, *[tuple(map(str, r)) for r in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def counted(counter: Counter) -> str:
    """8x128 4x32: how often each."""
    return " ".join(f"{n}x{kind}" for kind, n in sorted(counter.items(), key=str)) or "-"
