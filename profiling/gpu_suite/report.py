"""What a run leaves behind: a JSON file, and beside it the same as Markdown."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from apexk.outputs import write_json, write_text

from .environment import ROOT

RESULTS = ROOT / "profiling" / "results"


def default_path(gpu: str, part: str, day: datetime.date | None = None) -> Path:
    """`<date>-<gpu name>-<part>.json` among the results that the repository keeps."""
    day = day or datetime.date.today()
    return RESULTS / f"{day.isoformat()}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}-{part}.json"


def write(report: dict, path: Path) -> None:
    """The report at `path`, and as a `.md` file of the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, report)
    write_text(path.with_suffix(".md"), markdown(report))


def markdown(report: dict) -> str:
    about, results = report["environment"], report["results"]
    where = about["gpu"]["name"] if about["gpu"] else "no GPU: Triton's interpreter and a modelled clock"
    versions = ", ".join(f"{name} {found}" for name, found in about["packages"].items() if found)
    parts = [
        f"# {where}",
        f"{about['cpu']}; {versions}; commit {(about['commit'] or 'unknown')[:10]}{' (changed since)' if about['dirty'] else ''}.",
        f"Repeat: `{report['command']}`",
        _table(("piece", "status", "seconds", "message"), [
            (f"{r['part']}/{r['name']}", r["status"], f"{r['seconds']:.1f}", r["message"]) for r in results
        ]),
    ]  # fmt: skip
    for result in results:
        if result["numbers"]:
            cells = [(name, number(value)) for name, value in result["numbers"].items() if not isinstance(value, dict)]
            parts.append(f"## {result['part']}/{result['name']}\n\n" + _table(("what", "value"), cells))
            parts += [_by_name(name, value) for name, value in result["numbers"].items() if isinstance(value, dict) and value]
    rows = [row for result in results for row in result["rows"]]
    if rows:
        from apexk.kernels.bench.table import markdown as of_rows

        parts.append(of_rows(rows).rstrip())
    return "\n\n".join(parts) + "\n"


def number(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _by_name(title: str, rows: dict[str, dict]) -> str:
    """A line for each name, a column for each figure."""
    columns = list(next(iter(rows.values())))
    return _table((title, *columns), [(name, *(number(row.get(column)) for column in columns)) for name, row in rows.items()])


def _table(head, cells) -> str:
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines)
