"""A row of the comparison: ours beside the paper's, the band, and whether it is met."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from apexk.paper.targets import Target, load

#: target id -> (what must hold, how close). "rel": fraction of the paper's value; "abs": same unit; "min": not below; "equal"
BANDS: dict[str, tuple[str, float]] = {
    "fig3c.r32.cpu": ("rel", 0.05),
    "fig3c.r96.cpu": ("rel", 0.05),
    "fig3c.r32.cpu_share": ("abs", 0.03),
    "fig3c.r96.cpu_share": ("abs", 0.03),
    **{f"fig3d.P{p}.cpu": ("rel", 0.08) for p in (0, 2, 4, 8, 12)},
    "fig3d.P2.gpu": ("rel", 0.05),
    "fig3d.P4.gpu": ("rel", 0.05),
    "fig3d.best_P": ("equal", 0.0),
    "table3.none.tput": ("rel", 0.005),
    "derived.table3.ea.tput": ("rel", 0.07),
    "derived.table3.sa.tput": ("rel", 0.12),
    "table3.apex.tput": ("rel", 0.10),
    "table3.apex.tput, rates": ("rel", 0.13),
    "derived.postfetch.min": ("min", 0.0),
}


@dataclass(frozen=True)
class PaperRow:
    """`status`: met | missed (of a band that must hold) | report-only. `deviation` in percent of the paper's value."""

    figure: str
    id: str
    ours: object
    paper: object
    unit: str
    role: str
    deviation: float | None
    band: str
    status: str
    note: str = ""

    def as_dict(self) -> dict:
        return asdict(self)


def number(figure: str, id: str, ours: float, variant: str = "", note: str = "") -> PaperRow:
    """Our number for a target; `variant` names a second way to get it, with a band of its own."""
    target = load()[id]
    key = f"{id}, {variant}" if variant else id
    kind, tolerance = BANDS.get(key, ("", 0.0))
    deviation = 100 * (ours / target.value - 1) if target.value else None
    good = {
        "rel": abs(ours - target.value) <= tolerance * abs(target.value), "abs": abs(ours - target.value) <= tolerance,
        "min": ours >= target.value, "equal": ours == target.value, "": None,
    }[kind]  # fmt: skip
    band = {"rel": f"{100 * tolerance:g} %", "abs": f"+-{tolerance:g}", "min": "at least", "equal": "equal", "": "-"}[kind]
    return _row(figure, key, ours, target, deviation, band, good, note)


def statement(figure: str, id: str, ours: object, note: str = "") -> PaperRow:
    """A target that is no number, or one that is shown only."""
    return _row(figure, id, ours, load()[id], None, "-", None, note)


def check(figure: str, id: str, ours: object, wanted: str, good: bool, note: str = "") -> PaperRow:
    """A condition that must hold and is no target of its own."""
    return PaperRow(figure, id, ours, wanted, "", "check", None, "exact", "met" if good else "missed", note)


def untouched(seen: set[str]) -> list[PaperRow]:
    """Rows for the targets that no figure computes, so that none is absent."""
    return [_row("facts", t.id, None, t, None, "-", None, t.note) for t in load().values() if t.id not in seen]


def _row(figure: str, id: str, ours: object, target: Target, deviation: float | None, band: str, good: bool | None, note: str) -> PaperRow:
    status = "report-only" if good is None else "met" if good else "missed"
    return PaperRow(figure, id, ours, target.value, target.unit, target.role, deviation, band, status, note)
