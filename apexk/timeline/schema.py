"""`apexk.timeline/1`: what a line of a timeline holds.

The first line is the header: `schema`, and the facts of the run (`HEADER`). Every other line is one operation with the
fields of `FIELDS`; more fields may follow. Lines stand in the order in which operations were recorded, not by time.
Times are nanoseconds on one clock of the run. `modelled` says that they come from a hardware file, not from a clock.
"""

from __future__ import annotations

SCHEMA = "apexk.timeline/1"

HEADER = ("versions", "model", "config", "hardware", "device")

# Where an operation runs: compute stream, predictor stream, host-to-device channel, host workers, the model's thread.
LANES = ("gpu", "side", "h2d", "cpu", "host")

KINDS = {
    "route": "the layer's own router, up to its ids being on the host",
    "predict": "this layer's input through the next layer's router",
    "plan": "the policy's decision; carries `decision`",
    "copy.exact": "an expert that this layer needs, host to slot",
    "copy.spec": "an expert that the next layer may need; `abandoned` if it was stopped before its end",
    "gpu.resident": "expert FFN over slots that were resident at the routing event",
    "gpu.arrived": "expert FFN that waited for copies",
    "host.rows": "activations to or from the host workers",
    "host.ffn": "expert FFN on the CPU; spans the whole hand-over where that is not told apart",
    "shared": "shared expert",
    "combine": "weighted sum of all rows; ends the layer",
    "attention": "everything of the layer before its router",
    "unattributed": "layer time that no operation explains",
}

PHASES = ("prefill", "decode")

# Field -> (type, what it says). `experts`, `reads` and `writes` are lists of these types.
FIELDS = {
    "step": (int, "forward pass, from 0"),
    "layer": (int, "MoE layer whose experts are meant, from 0; for a speculative copy the layer it is made for"),
    "phase": (str, "prefill or decode"),
    "kind": (str, "one of KINDS"),
    "lane": (str, "one of LANES"),
    "start_ns": (int, "start"),
    "end_ns": (int, "end, not before the start"),
    "bytes": (int, "bytes moved"),
    "experts": (int, "expert ids"),
    "tokens": (int, "tokens, or token-expert pairs for an expert FFN"),
    "reads": (str, "buffers read"),
    "writes": (str, "buffers written"),
    "modelled": (bool, "times come from a hardware file"),
}
LISTS = ("experts", "reads", "writes")

# What `decision` of a plan row holds; with `inputs`, the policy makes the same decision again.
DECISION = ("policy", "inputs", "estimates", "choice")


def check_header(header) -> None:
    """Raise `ValueError` unless `header` is the first line of a timeline."""
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        found = header.get("schema") if isinstance(header, dict) else header
        raise ValueError(f"the first line must say schema {SCHEMA!r}, found {found!r}")
    missing = [key for key in HEADER if key not in header]
    if missing:
        raise ValueError(f"the header lacks {', '.join(missing)}")


def check_row(row) -> None:
    """Raise `ValueError` with the first thing that is wrong with an operation."""
    if not isinstance(row, dict):
        raise ValueError(f"an operation must be an object, found {row!r}")
    for field, (kind, _) in FIELDS.items():
        if field not in row:
            raise ValueError(f"field {field!r} is missing")
        value = row[field]
        if field in LISTS:
            if not isinstance(value, list) or any(type(item) is not kind for item in value):
                raise ValueError(f"{field} must be a list of {kind.__name__}, found {value!r}")
        elif type(value) is not kind:
            raise ValueError(f"{field} must be {kind.__name__}, found {value!r}")
        elif kind is int and value < 0:
            raise ValueError(f"{field} must not be negative, found {value}")
    check_words(row["kind"], row["lane"], row["phase"])
    if row["end_ns"] < row["start_ns"]:
        raise ValueError(f"end_ns {row['end_ns']} lies before start_ns {row['start_ns']}")
    if row["kind"] == "plan":
        check_decision(row.get("decision"))


def check_words(kind: str, lane: str, phase: str) -> None:
    for name, value, allowed in (("kind", kind, KINDS), ("lane", lane, LANES), ("phase", phase, PHASES)):
        if value not in allowed:
            raise ValueError(f"unknown {name} {value!r}; there are {', '.join(allowed)}")


def check_decision(decision) -> None:
    if not isinstance(decision, dict) or any(key not in decision for key in DECISION):
        raise ValueError(f"a plan carries `decision` with {', '.join(DECISION)}, found {decision!r}")
