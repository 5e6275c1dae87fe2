"""The generated page: the tables, and a line a system on where it does best and what it waits for there."""

from __future__ import annotations

from collections.abc import Sequence

from apexk.compare.measure import Row
from apexk.compare.report import COLUMNS, LOSSY, by_place, cells, heading

HEAD = """# The systems of the field on one engine

Every row runs on the same engine: the same slots, copies, costs and first residents, and only the decisions differ. All
times are **modelled**, none is measured; a system's own engine, kernels and formats are not part of it, so a row says what
its *decisions* are worth on this machine. This page is written by

    {command}

Requests carry a prompt each, computed in one pass; decode follows. Prompts and decode come from the same generated routing
(`apexk trace generate`), and the hardware files say where their numbers are from. Prefill is not fitted to any measurement:
`a6000-paper`'s costs come from decode, so its prefill columns compare systems and predict nothing.
"""


def write(rows: Sequence[Row], command: str, picture: str | None = None) -> str:
    """Markdown."""
    parts = [HEAD.format(command=command)]
    if picture:
        parts.append(f"![Decode throughput of each system, as a share of the clairvoyant run]({picture})\n")
    parts.append("## Where each does best, and why\n")
    parts.append("Best place: where its decode is nearest to the best system's. The shares are of decode time.\n")
    parts.append(_table(["system", "what decides", "best place", "there", "prefill: best place", "claimed, other hardware"], list(_lines(rows))))
    for place, here in by_place(rows).items():
        parts.append(f"\n## {heading(place)}\n")
        parts.append(_table(list(COLUMNS), [[f"`{line[0]}`", *line[1:]] for line in map(cells, here)]))
    parts.append("\n`clairvoyant` knows costs, next uses and the next layer's demand; `all_resident` has a slot for every expert and no CPU path. "
                 "± is half of the 95 % interval over seeds. TTFT is the prompts' pass alone. "
                 f"{LOSSY}.")  # fmt: skip
    parts.append("\nHow `replication` splits experts between GPU and CPU, and what several GPUs would change: `docs/replication.md`.")
    return "\n".join(parts) + "\n"


def _lines(rows: Sequence[Row]):
    places = {place: [r for r in here if not r.reference] for place, here in by_place(rows).items()}
    systems = list(dict.fromkeys(r.system for r in rows if not r.reference))
    for system in systems:
        decode, here = _best(places, system, "decode_tokens_per_s")
        prefill, ahead = _best(places, system, "prefill_tokens_per_s")
        yield [
            f"`{system.name}`", f"{system.idea} ({system.source})",
            "-" if here is None else f"{here.place.label}: {100 * decode:.0f} % of the best", "-" if here is None else _why(here),
            "-" if ahead is None else f"{ahead.place.label}: {100 * prefill:.0f} % of the best", system.claim,
        ]  # fmt: skip


def _best(places, system, figure: str) -> tuple[float, Row | None]:
    """The largest share of a place's best throughput that a system reaches, and its row there."""
    found = (0.0, None)
    for here in places.values():
        top = max((r.mean[figure] or 0.0 for r in here), default=0.0)
        own = next((r for r in here if r.system == system and r.mean[figure]), None)
        if own is not None and own.mean[figure] / top > found[0]:
            found = (own.mean[figure] / top, own)
    return found


def _why(row: Row) -> str:
    """What bounds it there, in its own figures."""
    mean = row.mean
    waits = sorted(((mean["for_weights"], "copies"), (mean["for_cpu"], "the CPU")), reverse=True)
    said = [f"{100 * share:.0f} % waiting for {what}" for share, what in waits if share >= 0.005]
    return ", ".join([f"GPU works {100 * mean['gpu_busy']:.0f} %", *said, f"hits {100 * mean['hit_rate']:.0f} %"])


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)])
