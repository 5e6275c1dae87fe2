"""A progress bar on stderr, only on a terminal."""

from __future__ import annotations

import sys

WIDTH = 30


def bar(label: str):
    """A callable `(done, all)` that redraws one line."""
    if not sys.stderr.isatty():
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        filled = WIDTH * done // max(total, 1)
        end = "\n" if done == total else ""
        print(f"\r{label} [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{total}", end=end, file=sys.stderr, flush=True)

    return show


def table(rows: list[list[str]]) -> str:
    """Left-aligned first column, right-aligned others."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join([r[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True)]).rstrip() for r in rows)


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def told(decode: dict, info: dict) -> str:
    """A run's decode steps in a line, from `handle.summary()["decode"]` and `handle.info()`."""
    if not decode["steps"]:
        return "no decode step"
    return (f"{decode['steps']} decode steps, {decode['ms_per_step']:.2f} ms each ({'modelled on ' if info['modelled'] else ''}{info['hardware']}), "
            f"{decode['hits']} of {decode['active']} active experts were resident, {decode['exact']} exact and {decode['speculative']} speculative copies")
