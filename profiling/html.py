"""One self-contained page of a run: settings, findings, tables, pictures for both kinds of screen. It loads nothing."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from html import escape
from pathlib import Path

from apexk.outputs import write_text
from apexk.timeline import Recording

from . import plot
from .findings import findings
from .report import number, title
from .tables import PHASES, layer_table, phase_totals

CAPTIONS = {
    "layer_timeline": "A warm step of middling duration: what each part of the machine did",
    "path_balance": "How the two paths balance",
    "transfers": "What was copied, and how often an expert was there",
    "residency": "Which experts stay in the pool",
    "estimates": "What the policy expected and what it took",
}
STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f27; --faint: #6b7280; --line: #e3e6ea; }
@media (prefers-color-scheme: dark) { :root { --page: #15181d; --ink: #e8eaed; --faint: #98a1ae; --line: #2c333d; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; } p.faint, figcaption { color: var(--faint); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { padding: .22rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; } th { font-weight: 600; }
td:first-child, th:first-child { text-align: left; } figure { margin: 1.4rem 0; } img { max-width: 100%; height: auto; display: block; }
pre { font-size: .8rem; overflow-x: auto; border: 1px solid var(--line); padding: .8rem; }
"""


def write_page(recording: Recording, path: str | os.PathLike, source: str, phases=PHASES, skip: int = 0) -> None:
    write_text(Path(path), page(recording, source, phases, skip))


def page(recording: Recording, source: str, phases=PHASES, skip: int = 0) -> str:
    """The page as text; `source` names the file that was read."""
    totals = {phase: found for phase in phases if (found := phase_totals(recording, phase, skip))}
    parts = [f"<h1>{escape(Path(source).name)}</h1>", f'<p class="faint">{escape(title(recording))}</p>']
    notes = findings(recording)
    parts.append("<h2>Worth a look</h2><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>" if notes else "")
    parts.append("<h2>Pictures</h2>" + _pictures(recording) if totals else "<p>No complete layer.</p>")
    if totals:
        names = list(next(iter(totals.values())))
        parts.append("<h2>Totals</h2>" + _table(["", *totals], [[name, *(total[name] for total in totals.values())] for name in names]))
    for phase in totals:
        rows = layer_table(recording, phase, skip)
        parts.append(f"<h2>{phase}: mean of each layer</h2><p class='faint'>Times in ms; experts a step.</p>" + _table(rows[0], [row.values() for row in rows]))
    parts.append(f"<h2>Settings</h2><pre>{escape(json.dumps(recording.header, indent=1))}</pre>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(Path(source).name)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(parts) + "\n</body></html>\n"


def _pictures(recording: Recording) -> str:
    with tempfile.TemporaryDirectory() as folder:
        light, dark = (plot.draw_all(recording, Path(folder) / name, dark=name == "dark") for name in ("light", "dark"))
        return "".join(_figure(one, other) for one, other in zip(light, dark, strict=True))


def _figure(light: Path, dark: Path) -> str:
    day, night = (f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in (light, dark))
    caption = escape(CAPTIONS[light.stem])
    return (f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{night}"><img src="{day}" alt="{caption}"></picture>'
            f"<figcaption>{caption}</figcaption></figure>")  # fmt: skip


def _table(head, rows) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(str(cell))}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(number(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return '<div class="wide"><table>' + "".join(lines) + "</table></div>"
