"""How long the nsys reader takes and how much memory: `python -m profiling.bench_reader [--events N]` builds an export of
N rows by the documented schema in a temporary folder, reads it in a process of its own, and says seconds and peak MiB."""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

LAYERS, OPERATIONS = 40, 10  # layers a pass; operations of each kind a layer
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, int64Value INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start INTEGER, end INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start INTEGER, end INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER",
}  # fmt: skip
READ = """
import json, resource, sys, time
from profiling.read_nsys import read_nsys
from profiling.layers import layer_lines
start = time.perf_counter()
rows = read_nsys(sys.argv[1]).rows
read = time.perf_counter() - start
lines = len(layer_lines(rows))
print(json.dumps({"read_s": read, "with_table_s": time.perf_counter() - start, "rows": len(rows), "layer_lines": lines,
                  "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def build(path: Path, events: int) -> int:
    """Writes whole passes until there are `events` rows; returns how many there are."""
    database = sqlite3.connect(path)
    for table, columns in TABLES.items():
        database.execute(f"CREATE TABLE {table} ({columns})")
    kinds = ("route", "submit", "copy.exact", "gpu.resident", "gpu.arrived", "combine")
    words = ["cudaLaunchKernel", "decode"] + [text for layer in range(LAYERS) for text in (f"L{layer:02d}", *(f"L{layer:02d}/{k}" for k in kinds))]
    ids = {text: i for i, text in enumerate(words, 1)}
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, text) for text, i in ids.items()])
    process, thread = 77 << 24, 77 << 24 | 1
    database.execute("INSERT INTO NVTX_EVENTS VALUES (0, NULL, 75, 'apexk', ?, NULL, NULL, 1, NULL)", (thread,))
    made, step, now, correlation = 0, 0, 1000, 0
    while made < events:
        ranges, calls, kernels, copies, began = [], [], [], [], now
        for layer in range(LAYERS):
            entered = now
            for kind in kinds:
                start = now
                for _ in range(OPERATIONS):
                    correlation, now = correlation + 1, now + 10
                    calls.append((now, now + 5, thread, correlation, 1))
                    if kind == "copy.exact":
                        copies.append((now + 50, now + 60, 20, correlation, process, 4096, 1, 1))
                    else:
                        kernels.append((now + 50, now + 60, 7, correlation, process))
                now += 10
                ranges.append((start, now, 59, None, thread, None, ids[f"L{layer:02d}/{kind}"], 1, 3))
                now += 1
            ranges.append((entered, now, 59, None, thread, None, ids[f"L{layer:02d}"], 1, step))
            now += 100
        ranges.append((began, now, 59, None, thread, None, ids["decode"], 1, step))
        for table, rows in zip(list(TABLES)[1:], (ranges, calls, kernels, copies), strict=True):
            database.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)
            made += len(rows)
        step += 1
    database.commit()
    database.close()
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="profiling.bench_reader", description=__doc__.split(":")[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.sqlite"
        made = build(path, options.events)
        done = subprocess.run([sys.executable, "-c", READ, str(path)], cwd=Path(__file__).resolve().parents[1], capture_output=True, text=True, check=True)
    found = {"events": made, **json.loads(done.stdout)}
    print(", ".join(f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
