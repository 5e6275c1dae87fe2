"""Benchmark rows as Markdown tables, one an operation; nothing is shown that is not in the file."""

import json
from pathlib import Path

from apexk.inputs import reading


def read_rows(path) -> list[dict]:
    """Rows of a file that `--jsonl` or `--json` wrote; of two with the same name and device the later one counts. ValueError for
    any other file."""
    with reading(path, "benchmark rows, which --jsonl and --json write"):
        text = Path(path).read_text(encoding="utf-8")
        try:
            document = json.loads(text)
            rows = document["rows"] if "rows" in document else [document]
        except json.JSONDecodeError:  # several lines
            rows = [json.loads(line) for line in text.splitlines()]
        if not rows:
            raise ValueError("there is none in it")
        return list({(row["name"], row["device"], row["op"]): row for row in rows}.values())


def markdown(rows) -> str:
    """Roofs first, then the operations in order of name."""
    parts = []
    for device in sorted({r["device"] for r in rows}):
        here = [r for r in rows if r["device"] == device]
        parts.append(f"## {device}\n\n" + _sources(here))
        roofs = [r for r in here if r["op"] == "roof"]
        if roofs:
            parts.append(_table(("roof", "measured"), [(r["name"][5:], f"{r['value']:.0f} {r['unit']}") for r in roofs]))
        for op in sorted({r["op"] for r in here} - {"roof"}):
            cells = [_cells(r) for r in here if r["op"] == op]
            parts.append(f"### {op}\n\n" + _table(("shape", "dtype", "provider", "p50 us", "p20 to p80", "% of roof", "roof", "others over it"), cells))
    return "\n\n".join(parts) + "\n"


def _cells(row):
    shape = " ".join(f"{k}={v}" for k, v in row["shape"].items())
    spread = f"{row['p20_ns'] / 1e3:.1f} to {row['p80_ns'] / 1e3:.1f}"
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row.get("ratio_vs", {}).items())
    return shape, row["dtype"], row["provider"], f"{row['p50_ns'] / 1e3:.1f}", spread, f"{row['percent_of_roof']:.0f}", row["roof"], ratios


def _sources(rows) -> str:
    versions = {json.dumps(r["versions"], sort_keys=True) for r in rows}
    commits = {f"{(r['commit'] or 'unknown')[:10]}{' (changed since)' if r['dirty'] else ''}" for r in rows}
    return f"Commit {', '.join(sorted(commits))}; versions {'; '.join(sorted(versions))}."


def _table(head, cells) -> str:
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
