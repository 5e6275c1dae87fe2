"""Timeline rows -> one line for each layer of each step: what took how long, and what hid behind what.

All sets are unions of intervals in ns. X: expert copies for this layer (Xe exact, Xs speculative, abandoned ones
included); G: expert FFN on the GPU; C: expert FFN on the CPU; A: activations there and back; W: the window from the
router's end to the merge's end. `|.|` is a set's length and `\\` takes away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields

from apexk.timeline import Recording

from .intervals import Set, intersect, length, subtract, union

LANES = {"gpu": "gpu_busy", "h2d": "channel_busy", "cpu": "cpu_busy"}
EXPERT_KERNELS = ("gpu.resident", "gpu.arrived")


@dataclass(frozen=True)
class LayerLine:
    """One layer of one step. Times in ns; None where nothing of the kind happened (or no plan was recorded)."""

    step: int
    layer: int
    phase: str
    tokens: int
    start_ns: int  # begin of the layer's dense part, or of its window
    end_ns: int  # end of its merge
    critical_ns: int  # |W|
    last: str | None  # which of cpu, gpu, transfer ended last
    transfer_ns: int  # |X|
    transfer_bytes: int
    transfer_gbps: float | None  # 1e9 bytes a second, while copying
    exposed_exact_ns: int  # |Xe & W \ G|: the channel works for this layer and no expert kernel runs
    exposed_wall_ns: int  # |Xe & W \ (G | C)|: nobody else works meanwhile
    gpu_compute_ns: int  # |G|
    cpu_compute_ns: int  # |C|
    cpu_path_ns: int  # |C | A|
    gpu_path_ns: int | None  # end(G) - start(W)
    overlap_xc_ns: int  # |Xe & C|
    overlap_gc_ns: int  # |G & C|
    hidden_spec_ns: int  # |Xs & (G | C | attention)| of this layer and the one before
    stall_ns: int  # |W \ compute stream|: the GPU has nothing to do (time that nothing explains is not counted here)
    idle_ns: int  # nobody works in the window: neither GPU, channel nor CPU
    gpu_busy: float  # share of the window in which the lane works
    channel_busy: float
    cpu_busy: float
    unattributed_ns: int
    n_exact: int
    n_spec: int
    spec_used: int  # speculative copies whose expert then ran on the GPU in this layer
    n_cpu: int
    n_resident: int | None
    n_active: int | None
    load_cpu: int  # token-expert pairs
    load_gpu: int

    @property
    def paper_cpu_ns(self) -> int:
        """The paper's CPU path: expert computation alone."""
        return self.cpu_compute_ns

    @property
    def paper_gpu_ns(self) -> int:
        """The paper's GPU path: expert computation and exposed transfer."""
        return self.gpu_compute_ns + self.exposed_exact_ns


COLUMNS = tuple(field.name for field in fields(LayerLine))


def lines_of(recording: Recording) -> list[LayerLine]:
    """`layer_lines` of a run, kept beside its rows: every table and picture begins with them."""
    kept = vars(recording)  # a frozen dataclass; its rows do not change
    if "_lines" not in kept:
        kept["_lines"] = layer_lines(recording.rows)
    return kept["_lines"]


def layer_lines(rows: Iterable[dict]) -> list[LayerLine]:
    """Lines by (step, layer). A layer that has no router or no merge in `rows` (a cut run) is left out."""
    groups: dict[tuple[int, int], list[dict]] = defaultdict(list)
    for row in rows:
        groups[row["step"], row["layer"]].append(row)
    lines = []
    for (step, layer), group in sorted(groups.items()):
        kinds = {row["kind"] for row in group}
        if {"route", "combine"} <= kinds:
            lines.append(_line(step, layer, group, groups.get((step, layer - 1), []), groups.get((step, layer + 1), [])))
    return lines


def _line(step: int, layer: int, group: list[dict], before: list[dict], after: list[dict]) -> LayerLine:
    routes = _of(group, "route")
    routed = max(routes, key=lambda row: row["tokens"])  # in a profile the router's kernels have rows of their own, without tokens
    start, end = max(row["end_ns"] for row in routes), max(row["end_ns"] for row in _of(group, "combine"))
    window = union([(start, end)])
    exact, speculative = _of(group, "copy.exact"), _of(group, "copy.spec")
    kernels, host = _of(group, *EXPERT_KERNELS), _of(group, "host.ffn")
    resident = _of(group, "gpu.resident")
    x, xe, xs = _time(exact + speculative), _time(exact), _time(speculative)
    g, c, path = _time(kernels), _time(host), _time(host + _of(group, "host.rows"))
    behind = _time(_of(before + group, *EXPERT_KERNELS, "host.ffn", "attention"))
    moved = sum(row["bytes"] for row in exact + speculative)
    dense = [row["start_ns"] for row in _of(group, "attention")]
    ends = {name: s[-1][1] for name, s in (("transfer", xe), ("cpu", path), ("gpu", g)) if s}
    ran = {expert for row in kernels for expert in row["experts"]}
    landed = {expert for row in speculative if not row.get("abandoned") for expert in row["experts"]}
    plans = [row["decision"]["choice"] for row in _of(group, "plan")]
    # the channel may work for another layer meanwhile: a prefetch into the next one is a row of that layer
    lanes = {lane: intersect(window, _time([row for row in group + after if row["lane"] == lane and row["kind"] != "unattributed"])) for lane in LANES}
    stall = subtract(window, _time([row for row in group if row["lane"] == "gpu"]))
    return LayerLine(
        step=step,
        layer=layer,
        phase=routed["phase"],
        tokens=routed["tokens"],
        start_ns=min([*dense, start]),
        end_ns=end,
        critical_ns=length(window),
        last=max(reversed(ends), key=ends.__getitem__) if ends else None,
        transfer_ns=length(x),
        transfer_bytes=moved,
        transfer_gbps=moved / length(x) if x else None,
        exposed_exact_ns=length(subtract(intersect(xe, window), g)),
        exposed_wall_ns=length(subtract(intersect(xe, window), union(g + c))),
        gpu_compute_ns=length(g),
        cpu_compute_ns=length(c),
        cpu_path_ns=length(path),
        gpu_path_ns=g[-1][1] - start if g else None,
        overlap_xc_ns=length(intersect(xe, c)),
        overlap_gc_ns=length(intersect(g, c)),
        hidden_spec_ns=length(intersect(xs, behind)),
        stall_ns=length(stall),
        idle_ns=length(subtract(stall, union(lanes["h2d"] + lanes["cpu"]))),
        **{name: length(lanes[lane]) / length(window) if window else 0.0 for lane, name in LANES.items()},
        unattributed_ns=length(_time(_of(group, "unattributed"))),
        n_exact=sum(len(row["experts"]) for row in exact),
        n_spec=sum(len(row["experts"]) for row in speculative),
        spec_used=len(landed & ran),
        n_cpu=_experts(host),
        n_resident=len(plans[-1]["gpu_resident"]) if plans else _experts(resident) if resident else None,
        n_active=sum(len(plans[-1][part]) for part in ("gpu_resident", "exact_fetch", "cpu")) if plans else None,
        load_cpu=sum(row["tokens"] for row in host),
        load_gpu=sum(row["tokens"] for row in kernels),
    )


def _experts(rows: list[dict]) -> int:
    """How many experts; the parts of a long input name the same ones again, and profiles know their number only."""
    return len({expert for row in rows for expert in row["experts"]}) or max((row.get("count", 0) for row in rows), default=0)


def _of(rows: list[dict], *kinds: str) -> list[dict]:
    return [row for row in rows if row["kind"] in kinds]


def _time(rows: list[dict]) -> Set:
    return union((row["start_ns"], row["end_ns"]) for row in rows)
