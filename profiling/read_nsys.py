"""Reads an sqlite export of Nsight Systems (`nsys export --type sqlite`) as timeline rows.

Tables exist only where they have data, and columns differ between versions, so what is there decides and no version
number does: known from the documented schema of products 2024.6.2 and 2025.6.3. The file is opened read-only; it has no
indexes, and none is needed, since joins are made on sorted arrays.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

import numpy as np

from apexk.timeline import SCHEMA, Recording

from .attribution import KERNEL, OTHER, SYNCS, TO_DEVICE, TO_HOST, Calls, Marks, Operations, ProfileError, rows_of

MAGIC = b"SQLite format 3\x00"
DOMAIN = "apexk"
PUSH_POP, PUSH_POP_TEXT, DOMAIN_CREATED = 59, 70, 75
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2  # copyKind
PAGEABLE = 0  # srcKind
CHUNK = 50_000

# table -> (columns that must be there, columns that may be)
COLUMNS = {
    "NVTX_EVENTS": (("start", "end", "eventType", "globalTid"),
                    ("text", "textId", "domainId", "endGlobalTid", "int64Value", "uint64Value", "int32Value", "uint32Value")),
    "CUPTI_ACTIVITY_KIND_RUNTIME": (("start", "end", "globalTid", "correlationId"), ("nameId",)),
    "CUPTI_ACTIVITY_KIND_KERNEL": (("start", "end", "streamId", "correlationId"), ("globalPid",)),
    "CUPTI_ACTIVITY_KIND_MEMCPY": (("start", "end", "streamId", "correlationId", "bytes", "copyKind"), ("globalPid", "srcKind")),
    "CUPTI_ACTIVITY_KIND_MEMSET": (("start", "end", "streamId", "correlationId", "bytes"), ("globalPid",)),
    "PROFILER_OVERHEAD": (("start", "end"), ()),
    "StringIds": (("id", "value"), ()),
    "META_DATA_EXPORT": (("name", "value"), ()),
    "TARGET_INFO_GPU": ((), ("name", "totalMemory", "smCount", "computeMajor", "computeMinor")),
}  # fmt: skip


def is_sqlite(path: str | os.PathLike) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_nsys(path: str | os.PathLike) -> Recording:
    """Rows of the ranges, calls, kernels and copies of an export. Raises `ProfileError` for a file that is none, with the
    table or column that is missing."""
    if not is_sqlite(path):
        what = "an .nsys-rep report: export it first, nsys export --type sqlite" if str(path).endswith((".nsys-rep", ".qdrep")) else "no SQLite file"
        raise ProfileError(f"{path} is {what}")
    database = sqlite3.connect(f"file:{quote(str(Path(path).resolve()))}?mode=ro&immutable=1", uri=True)
    try:
        return _read(_Export(database, path))
    except sqlite3.DatabaseError as error:
        raise ProfileError(f"{path}: SQLite cannot read it: {error}") from error
    finally:
        database.close()


class _Export:
    """The tables that are there, with what each lacks."""

    def __init__(self, database: sqlite3.Connection, path):
        self.path, self._database = path, database
        self.tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
        if "NVTX_EVENTS" not in self.tables:
            known = sorted(self.tables & set(COLUMNS))
            why = "no range was captured: is nvtx installed, and was -t nvtx given?" if known else "it is no export of Nsight Systems"
            raise ProfileError(f"{path} has no table NVTX_EVENTS: {why} (tables: {', '.join(sorted(self.tables)[:8]) or 'none'})")

    def select(self, table: str, where: str = "", *, rest: str = "") -> sqlite3.Cursor:
        """All known columns of a table, in the order of COLUMNS, NULL for those that this version lacks."""
        there = {row[1] for row in self._database.execute(f'PRAGMA table_info("{table}")')}
        wanted, optional = COLUMNS[table]
        missing = [column for column in wanted if column not in there]
        if missing:
            raise ProfileError(f"{self.path}: table {table} lacks the column {', '.join(missing)}; it has {', '.join(sorted(there))}")
        columns = [c if c in there else f"NULL AS {c}" for c in (*wanted, *optional)]
        return self._database.execute(f'SELECT {", ".join(columns)} FROM "{table}" {where} {rest}')

    def integers(self, table: str) -> dict[str, np.ndarray]:
        """Columns as int64, -1 for NULL; empty where there is no such table."""
        names = [*COLUMNS[table][0], *COLUMNS[table][1]]
        parts = [np.empty((0, len(names)), np.int64)]
        if table in self.tables:
            cursor = self.select(table)
            while rows := cursor.fetchmany(CHUNK):
                parts.append(np.array([[-1 if v is None else v for v in row] for row in rows] if any(None in row for row in rows) else rows, np.int64))
        return dict(zip(names, np.concatenate(parts).T, strict=True))

    def strings(self, where: str = "") -> dict[int, str]:
        return dict(self.select("StringIds", where)) if "StringIds" in self.tables else {}


def _read(export: _Export) -> Recording:
    marks, facts = _marks(export)
    processes = _Processes()
    calls = _calls(export, processes)
    rows, found = rows_of(marks, calls, _operations(export, processes))
    overhead = export.integers("PROFILER_OVERHEAD")
    facts |= found | {"overhead_ns": int((overhead["end"] - overhead["start"]).sum())}
    meta = dict(export.select("META_DATA_EXPORT")) if "META_DATA_EXPORT" in export.tables else {}
    gpus = [row[0] for row in export.select("TARGET_INFO_GPU")] if "TARGET_INFO_GPU" in export.tables else []
    versions = {"nsys": meta.get("EXPORT_PRODUCT_VERSION"), "schema": meta.get("EXPORT_SCHEMA_VERSION")}
    return Recording({"schema": SCHEMA, "versions": versions, "model": {}, "config": {}, "hardware": "measured by Nsight Systems",
                      "device": ", ".join(filter(None, gpus)) or "unknown", "profile": {"source": "nsys", **facts}}, rows)  # fmt: skip


def _marks(export: _Export) -> tuple[Marks, dict]:
    """Push/pop ranges of the domain that end on the thread they began on."""
    names = export.strings("WHERE id IN (SELECT textId FROM NVTX_EVENTS)" if _has(export, "NVTX_EVENTS", "textId") else "WHERE 0")
    created = export.select("NVTX_EVENTS", f"WHERE eventType = {DOMAIN_CREATED}")
    domains = {row[6] for row in created if (row[4] or names.get(row[5])) == DOMAIN}
    if not domains:
        raise ProfileError(f"{export.path} has no NVTX domain {DOMAIN!r}: was an apexk model swapped under nsys?")
    kept, opened, moved = [], 0, 0
    for start, end, _, thread, text, text_id, domain, end_thread, *payloads in export.select(
        "NVTX_EVENTS", f"WHERE eventType IN ({PUSH_POP}, {PUSH_POP_TEXT})"
    ):
        if domain not in domains:
            continue
        if end is None:
            opened += 1
        elif end_thread not in (None, thread):
            moved += 1
        else:
            payload = next((value for value in payloads if value is not None), 0)
            kept.append((start, end, thread, payload, text if text is not None else names.get(text_id, "")))
    columns = list(zip(*kept, strict=True)) or [()] * 5
    arrays = [np.array(column, np.int64) for column in columns[:4]]
    return Marks(*arrays, list(columns[4])), {"open_ranges": opened, "moved_ranges": moved}


def _has(export: _Export, table: str, column: str) -> bool:
    return any(row[1] == column for row in export._database.execute(f'PRAGMA table_info("{table}")'))


class _Processes:
    """Makes correlations, which are unique in a process only, unique in the file."""

    def __init__(self):
        self._index: dict[int, int] = {}

    def keys(self, correlation: np.ndarray, process: np.ndarray) -> np.ndarray:
        values, inverse = np.unique(process, return_inverse=True)
        index = np.array([self._index.setdefault(int(v), len(self._index)) for v in values], np.int64)
        return (index[inverse] << 33) + correlation if len(values) else correlation


def _calls(export: _Export, processes: _Processes) -> Calls:
    table = export.integers("CUPTI_ACTIVITY_KIND_RUNTIME")
    names = export.strings("WHERE value LIKE 'cu%ynchronize%'")
    waits = [i for i, name in names.items() if name.startswith(SYNCS)]
    return Calls(table["start"], table["end"], table["globalTid"], processes.keys(table["correlationId"], table["globalTid"] & ~0xFFFFFF),
                 np.isin(table["nameId"], waits))  # fmt: skip


def _operations(export: _Export, processes: _Processes) -> Operations:
    kernels, copies, sets = (export.integers(f"CUPTI_ACTIVITY_KIND_{name}") for name in ("KERNEL", "MEMCPY", "MEMSET"))
    nothing = np.zeros(len(kernels["start"]), np.int64)
    copied = np.select([copies["copyKind"] == HOST_TO_DEVICE, copies["copyKind"] == DEVICE_TO_HOST], [TO_DEVICE, TO_HOST], OTHER)
    what = np.concatenate([nothing + KERNEL, copied, np.full(len(sets["start"]), OTHER)])

    def joined(column):
        return np.concatenate([table[column] for table in (kernels, copies, sets)])

    process = joined("globalPid")
    if len(processes._index) == 1:  # versions without the column, or NULL: there is one process to belong to
        process = np.where(process < 0, next(iter(processes._index)), process)
    pageable = np.concatenate([nothing, copies["srcKind"] == PAGEABLE, np.zeros(len(sets["start"]), np.int64)]).astype(bool)
    size = np.concatenate([nothing, copies["bytes"], sets["bytes"]])
    return Operations(joined("start"), joined("end"), processes.keys(joined("correlationId"), process), what, joined("streamId"), size, pageable)
