"""A table of simulated policies as a page: one section per trace, one group of columns per hardware file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apexk.sim.cells import Row

ABOUT = """\
# Policies compared, modelled

Written by the command below; every time is modelled, none measured. Each policy runs on the same engine, traces, pool and first residents; the
hardware files say what work costs (`apexk/hardware/*.json`). The last five rows are references that no policy can be:
`oracle_p` knows the true costs, `foretold` the next layer's demand, `belady` the future of each expert, `clairvoyant` all three, `all_resident` has a slot for
every expert. A hardware file's own settings hold for all rows of its columns, so where resident experts wait for the copies they do for the
clairvoyant row too (`apex_paper` always waits).

```
{command}
```

- tokens/s: mean over the seeds, with half of its 95 % interval where there are several;
- % clairvoyant: of the clairvoyant row's tokens/s in the same column;
- estimate off: mean of |estimated longer path / path taken - 1|, where the policy estimates.
"""


def page(rows: Sequence[Row], command: str) -> str:
    """Markdown of `rows` (as `run_table` returns them); `command` is what made them."""
    parts = [ABOUT.format(command=command)]
    machines = list(dict.fromkeys(row.cell.machine for row in rows))
    for place in dict.fromkeys(map(_place, rows)):
        here = [row for row in rows if _place(row) == place]
        parts.append(f"## {_title(here[0])}\n\n{_table(here, machines)}\n")
    return "\n".join(parts)


def machine_name(given: str) -> str:
    """Of a hardware file, as it was named or by path."""
    return Path(given).name.removesuffix(".json")


def _place(row: Row) -> tuple:
    return row.cell.spec, row.cell.pool


def _title(row: Row) -> str:
    spec = row.cell.spec
    trace = Path(spec.path).name if spec.path else f"{spec.preset}, {spec.model}, {spec.batch} tokens a step, {spec.phase}"
    return f"{trace}, {row.cell.pool} slots a layer"


def _table(rows: Sequence[Row], machines: Sequence[str]) -> str:
    found = {(row.cell.policy, row.cell.machine): row for row in rows}
    names = [machine_name(machine) for machine in machines]
    lines = [["policy", *(f"{name}: {what}" for name in names for what in ("tokens/s", "% clairvoyant", "estimate off"))]]
    lines.append(["---", *["--:"] * (3 * len(machines))])
    for policy in dict.fromkeys(row.cell.policy for row in rows):
        lines.append([f"`{policy}`", *(cell for machine in machines for cell in _cells(found[policy, machine]))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row) -> tuple[str, str, str]:
    mean, half = row.mean["tokens_per_s"], row.half["tokens_per_s"]
    error, share = row.mean["estimate_error"], row.percent_of_clairvoyant
    return (f"{mean:.1f}" + ("" if half is None else f" ± {half:.1f}"), "-" if share is None else f"{share:.1f}", f"{100 * error:.1f} %" if error else "-")
