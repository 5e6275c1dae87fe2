"""How every picture looks: a page for print and one for a dark screen, a colour for each kind of work."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apexk.timeline import Recording

# Kind -> (label, hatch). Colours differ in lightness and the speculative copies carry a hatch, so that kinds are told apart
# without colour.
STYLE = {
    "attention": ("attention, router", ""),
    "gpu.resident": ("experts, resident", ""),
    "gpu.arrived": ("experts, after the copies", ""),
    "shared": ("shared expert", ""),
    "combine": ("merge", ""),
    "copy.exact": ("exact copy", ""),
    "copy.spec": ("speculative copy", "////"),
    "abandoned": ("speculative copy, abandoned", "xxxx"),
    "host.ffn": ("experts on the CPU", ""),
    "host.rows": ("activations", ""),
    "unattributed": ("not attributed", "...."),
}


@dataclass(frozen=True)
class Theme:
    page: str
    panel: str  # behind a lane
    ink: str
    faint: str
    faces: dict[str, str]
    inverse: frozenset[str]  # kinds whose bars carry text in the page's colour
    map: str  # matplotlib's name of the colour map for shares
    series: tuple[str, ...] = ()  # for things that have no kind, in this order


LIGHT = Theme(
    "#ffffff", "#f4f5f7", "#1b1f27", "#6b7280",
    {"attention": "#c9ced6", "gpu.resident": "#0b5fa5", "gpu.arrived": "#4da3e0", "shared": "#8d7fc4", "combine": "#3c4350", "copy.exact": "#d9541e",
     "copy.spec": "#f6c453", "abandoned": "#ffffff", "host.ffn": "#15846b", "host.rows": "#9ad1bf", "unattributed": "#ffffff"},
    frozenset({"gpu.resident", "combine", "copy.exact", "host.ffn", "shared"}), "Blues",
    ("#0b5fa5", "#d9541e", "#15846b", "#8d7fc4", "#b8860b", "#3c4350"),
)  # fmt: skip
DARK = Theme(
    "#15181d", "#20252c", "#e8eaed", "#98a1ae",
    {"attention": "#4a525e", "gpu.resident": "#7db9f0", "gpu.arrived": "#2f76b8", "shared": "#b3a6ea", "combine": "#c3c9d2", "copy.exact": "#ff8a5c",
     "copy.spec": "#d9a62e", "abandoned": "#15181d", "host.ffn": "#4cc9a4", "host.rows": "#2b6b58", "unattributed": "#15181d"},
    frozenset({"gpu.resident", "combine", "copy.exact", "host.ffn", "shared", "copy.spec"}), "Blues_r",
    ("#7db9f0", "#ff8a5c", "#4cc9a4", "#b3a6ea", "#d9a62e", "#c3c9d2"),
)  # fmt: skip


def theme(dark: bool) -> Theme:
    return DARK if dark else LIGHT


def plain(figure: Figure, axes: Axes, look: Theme, *, grid: str | None = "y") -> None:
    """Page, ink and two spines; a grid, if any, behind everything."""
    figure.set_facecolor(look.page)
    axes.set_facecolor(look.page)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(look.faint)
    axes.tick_params(colors=look.faint, labelcolor=look.ink, labelsize=8.5, length=3)
    axes.xaxis.label.set_color(look.ink)
    axes.yaxis.label.set_color(look.ink)
    axes.xaxis.label.set_size(9.5)
    axes.yaxis.label.set_size(9.5)
    if grid:
        axes.grid(axis=grid, color=look.faint, alpha=0.22, linewidth=0.7)
        axes.set_axisbelow(True)


def headline(figure: Figure, look: Theme, text: str, below: str = "", *, left: float) -> None:
    """Title at the upper left; how times were made, in small, at the lower right."""
    figure.text(left, 0.965, text, ha="left", va="top", color=look.ink, fontsize=11.5)
    if below:
        figure.text(0.985, 0.015, below, ha="right", va="bottom", color=look.faint, fontsize=8)


def clock(recording: Recording) -> str:
    """How the run's times were made: by which tool, or measured or modelled on what."""
    hardware = recording.header["hardware"]
    if "profile" in recording.header:
        return hardware
    return f"{'modelled' if any(row['modelled'] for row in recording.rows) else 'measured'} on {hardware}"


def legend(axes: Axes, look: Theme, **more) -> None:
    axes.legend(frameon=False, fontsize=8.5, labelcolor=look.ink, **more)
