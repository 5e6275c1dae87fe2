"""Traces from other programs' files: per-request npz, JSON lines, Parquet.

npz      one file a request, `routed_experts [T, L, K]` (vLLM, SGLang), with `prompt_token_ids` telling where decode begins
jsonl    one object a (token, layer): step, request, position, layer, experts, and optional weights, phase
parquet  one row a (token, layer): `indices`, `scores` (the FLAME-MoE-Traces layout), and step, request, position, phase,
         layer where they are there; needs pyarrow
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from apexk.inputs import reading
from apexk.outputs import writing
from apexk.sim.trace import DECODE, PREFILL, SCHEMA, Trace, TraceError

MOST_EXPERTS = 1 << 15  # ids are int16


def from_request_npz(paths: Sequence[str | Path], *, model: str, experts: int, dataset: str = "", licence: str = "") -> Trace:
    """One step per position of decode, all requests in step, after one prefill step that holds every prompt.

    A file without `prompt_token_ids` is all decode.
    """
    parts = []
    for number, path in enumerate(paths):
        with reading(path, "npz", TraceError), np.load(path, allow_pickle=False) as data:
            if "routed_experts" not in data.files:
                raise TraceError(f"{path}: no routed_experts; it holds {', '.join(data.files) or 'nothing'}")
            ids = data["routed_experts"]
            prompt = len(data["prompt_token_ids"]) if "prompt_token_ids" in data.files else 0
        if ids.ndim != 3:
            raise TraceError(f"{path}: routed_experts has shape {list(ids.shape)}, wanted [T, L, K]")
        parts.append((number, ids, min(prompt, len(ids)), path))
    if not parts:
        raise TraceError("no file to import")
    if len({ids.shape[1:] for _, ids, _, _ in parts}) > 1:
        shapes = ", ".join(f"{path} {list(ids.shape[1:])}" for _, ids, _, path in parts)
        raise TraceError(f"mixed models: layers and experts a token differ: {shapes}")
    first = 1 if any(prompt for _, _, prompt, _ in parts) else 0
    rows = [
        (0 if position < prompt else first + position - prompt, number, position, PREFILL if position < prompt else DECODE, ids[position])
        for number, ids, prompt, _ in parts for position in range(len(ids))
    ]  # fmt: skip
    return _trace(rows, model, experts, dataset, licence, str(paths[0]))


def from_jsonl(path: str | Path, *, model: str, experts: int, dataset: str = "", licence: str = "") -> Trace:
    """Lines as in the module; a token's lines may stand in any order and must name every layer once."""
    def lines() -> Iterable[dict]:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError as error:
                        raise TraceError(f"{path}, line {number}: not JSON ({error})") from error

    with reading(path, "JSON lines of routing", TraceError):
        return _from_rows(lines(), "experts", "weights", path, model, experts, dataset, licence)


def from_parquet(path: str | Path, *, model: str, experts: int, dataset: str = "", licence: str = "") -> Trace:
    """Columns as in the module. Raises ModuleNotFoundError without pyarrow."""
    import pyarrow.parquet as parquet

    with reading(path, "Parquet with routing", TraceError):
        return _from_rows(parquet.read_table(path).to_pylist(), "indices", "scores", path, model, experts, dataset, licence)


def to_parquet(trace: Trace, path: str | Path) -> None:
    """One row a (token, layer) in the layout that `from_parquet` reads. Raises ModuleNotFoundError without pyarrow."""
    import pyarrow
    import pyarrow.parquet as parquet

    tokens, layers, topk = trace.routed_experts.shape
    columns = {name: np.repeat(getattr(trace, name), layers) for name in ("step", "request", "position", "phase")}
    columns["layer"] = np.tile(np.arange(layers, dtype=np.int32), tokens)
    columns["indices"] = list(trace.routed_experts.reshape(-1, topk))
    if trace.routed_weights is not None:
        columns["scores"] = list(trace.routed_weights.reshape(-1, topk).astype(np.float32))
    with writing(Path(path)) as part:
        parquet.write_table(pyarrow.table(columns), part)


def _from_rows(lines: Iterable[dict], ids: str, weights: str, path, model, experts, dataset, licence) -> Trace:
    tokens: dict[tuple, dict[int, list[int]]] = defaultdict(dict)
    scores: dict[tuple, dict[int, list[float]]] = defaultdict(dict)
    for number, line in enumerate(lines, 1):
        missing = [key for key in ("layer", ids) if key not in line]
        if missing:
            raise TraceError(f"{path}, row {number}: {', '.join(missing)} missing")
        key = (line.get("step", line.get("position", 0)), line.get("request", 0), line.get("position", line.get("step", 0)), line.get("phase", DECODE))
        if line["layer"] in tokens[key]:
            raise TraceError(f"{path}, row {number}: layer {line['layer']} comes twice for step {key[0]}, request {key[1]}, position {key[2]}")
        tokens[key][line["layer"]] = line[ids]
        if line.get(weights) is not None:
            scores[key][line["layer"]] = line[weights]
    if not tokens:
        raise TraceError(f"{path}: no row")
    names = sorted(next(iter(tokens.values())))
    rows = []
    for key, layers in tokens.items():
        if sorted(layers) != names or len({len(v) for v in layers.values()}) > 1:
            raise TraceError(f"{path}: step {key[0]}, request {key[1]}, position {key[2]} lacks layers or experts: {sorted(layers)} of {names}")
        rows.append((*key, np.array([layers[n] for n in names])))
    weighted = [scores[key] for key in tokens]
    full = all(len(w) == len(names) for w in weighted)
    values = [np.array([w[n] for n in names], np.float16) for w in weighted] if full else None
    return _trace(rows, model, experts, dataset, licence, str(path), names, values)


def _trace(rows, model, experts, dataset, licence, source, layer_ids=None, weights=None) -> Trace:
    """`rows` of (step, request, position, phase, ids [L, K]) in any order."""
    if not rows:
        raise TraceError(f"{source}: no token")
    if len({row[4].shape for row in rows}) > 1:
        raise TraceError(f"{source}: tokens name different numbers of experts")
    order = sorted(range(len(rows)), key=lambda i: rows[i][:3])
    steps = {step: number for number, step in enumerate(sorted({row[0] for row in rows}))}
    column = [np.array([steps[rows[i][0]] for i in order], np.int32)]
    column += [np.array([rows[i][k] for i in order], t) for k, t in ((1, np.int32), (2, np.int32), (3, np.uint8))]
    ids = np.stack([rows[i][4] for i in order])
    if ids.dtype.kind not in "iu" or ids.size == 0:
        raise TraceError(f"{source}: expert ids are {ids.dtype} {list(ids.shape)}, wanted whole numbers")
    if experts > MOST_EXPERTS:
        raise TraceError(f"{source}: {experts} experts; a trace can name {MOST_EXPERTS}")
    if ids.min() < 0 or ids.max() >= experts:
        raise TraceError(f"{source}: ids {int(ids.min())}..{int(ids.max())}, wanted 0..{experts - 1}")
    meta = {"schema": SCHEMA, "model": model, "experts": experts, "top_k": ids.shape[2], "layer_ids": layer_ids or list(range(ids.shape[1])),
            "dataset": dataset, "seed": None, "generator": None, "licence": licence}
    stacked = None if weights is None else np.stack([weights[i] for i in order])
    return Trace(ids.astype(np.int16), *column, meta=meta, routed_weights=stacked, source=source)
