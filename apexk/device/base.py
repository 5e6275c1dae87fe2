"""What the engine asks of a device, and the plain records that pass between them.

Lanes: `gpu` (compute stream), `side` (predictor stream), `h2d` (host-to-device channel), `cpu` (host FFN workers) and
`host` (the thread that runs the model). Work on one lane runs in order; across lanes only events order it. Every
operation names what it reads and writes, so that an ordering check needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

#: a router: MoE input [T, H] -> (expert ids [T, topk], routing weights [T, topk])
Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Predicted = tuple[Mapping[int, int], Mapping[int, float]]  # (loads, score sums) of the experts that a router names


@dataclass(frozen=True)
class At:
    """Where in a run an operation belongs: forward pass, MoE layer (counted over sparse layers), phase."""

    step: int
    layer: int
    phase: str


WAVES = 2  # number of the buffer for the rows of waves; parts take turns in the first two
LATE = (3, 4)  # of those for what is computed one layer late, taken in turn


@dataclass
class Rows:
    """The MoE input of one layer and its exact routing.

    With tensors: `x [T, H]` in the weight dtype, `topk_ids [T, topk]` int64, `topk_weights [T, topk]` float32, and
    `pairs [T*topk, H]` float32, which the device provides and the GPU and CPU halves fill row by row (row t*topk+k).
    Without tensors (a simulation) `loads` holds the active experts' token loads and `predicted` the (loads, score sums) of
    the layers that follow, nearest first, as far as they are predicted. Long inputs are run in `parts`, views of consecutive
    tokens whose `loads` the routing event fills; parts share two `pairs` buffers in turn, so the memory of a layer is bounded
    whatever the number of tokens. Where experts come in waves, each wave runs all parts through a third buffer (`in_waves`), and
    the rows are added to sums fp32 `[T, H]`. A deferred share of the CPU's has rows of its own (`deferred`), which the merge of the next
    layer adds as its `late`; the layer's own merge then leaves their experts out (`withheld`). Where experts are split between GPU and
    CPU, each side runs a share, whose `loads` and ids know of no other side's pairs (`divide`); both fill the same `pairs`.
    """

    tokens: int
    topk: int
    x: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    loads: Mapping[int, int] | None = None
    predicted: Sequence[Predicted] = ()
    start: int = 0  # of a part: its first token
    buffer: int | None = None  # of a part: which of the `pairs` buffers is its
    summed: bool = False  # of a part: the layer's sums hold what was accumulated of it
    places: Mapping[int, int] | None = None  # without tensors, by active expert: its best place in any token's order of weights, 0 the heaviest
    withheld: bool = False
    late: tuple[Rows, tuple[int, ...]] | None = None  # of the layer before: (rows, experts)
    shares: tuple[Rows, Rows] | None = None  # the GPU's and the CPU's, where experts are split between them
    sides: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # by split expert: whose rows these are, "gpu", "cpu" or both
    host_ids: tuple[torch.Tensor, torch.Tensor] | None = None  # of a share on a device with memory of its own: its ids on the host, and their view
    parts: list[Rows] = field(default_factory=list)  # empty where the input is run whole

    def split(self, tokens: int) -> list[Rows]:
        """Parts of at most `tokens` tokens each, none where that is one part. A simulation's parts are as they were given."""
        if self.x is None:
            return self.parts
        if self.tokens <= tokens:
            return []
        parts = []
        for number, start in enumerate(range(0, self.tokens, tokens)):
            x, ids, weights = (tensor[start : start + tokens] for tensor in (self.x, self.topk_ids, self.topk_weights))
            parts.append(Rows(x.shape[0], self.topk, x, ids, weights, start=start, buffer=number % 2))
        return parts

    def in_waves(self) -> Rows:
        """This part again, for the rows of waves."""
        return replace(self, buffer=WAVES, pairs=None)

    def deferred(self, buffer: int) -> Rows:
        """These tokens again, for what is computed one layer late: with an input of its own, since the next layer writes over this one's."""
        return replace(self, buffer=buffer, pairs=None, late=None, x=None if self.x is None else self.x.clone())

    def divide(self, split: Mapping[int, int], gpu_ids: torch.Tensor | None = None, cpu_ids: torch.Tensor | None = None) -> None:
        """Makes the `shares`: of each expert in `split` the GPU has the first so many pairs (0 to all, of a part), the CPU the others. With tensors
        the shares' ids are those of `divided_ids`."""
        left = {e: self.loads[e] - n for e, n in split.items()}

        def share(side: str, ids: torch.Tensor | None, pairs: Mapping[int, int]) -> Rows:
            loads = self.loads | pairs
            return replace(self, topk_ids=ids, loads={e: n for e, n in loads.items() if n}, sides={e: (side,) for e in pairs})

        self.shares = share("gpu", gpu_ids, split), share("cpu", cpu_ids, left)
        self.sides = {e: ("gpu", "cpu") for e in split}

    def best_places(self) -> Mapping[int, int]:
        """By active expert: its best place in any token's order of weights, 0 the heaviest; among equal weights the first counts as heavier."""
        if self.x is None:
            if self.places is None:
                raise ValueError("nothing tells the experts' weights, by which some would be deferred")
            return self.places
        order = self.topk_weights.argsort(dim=-1, descending=True, stable=True)
        best: dict[int, int] = {}
        for place, experts in reversed(list(enumerate(self.topk_ids.gather(-1, order).T.tolist()))):
            best.update(dict.fromkeys(experts, place))
        return best

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The tokens of this part in a tensor of the whole input's `[T, H]`."""
        return None if tensor is None else tensor[self.start : self.start + self.tokens]


def divided_ids(ids: torch.Tensor, split: Mapping[int, int], nobody: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(GPU's, CPU's) ids: `ids [T, topk]` with `nobody` in place of the pairs that the other side computes. Of an expert in `split` the GPU computes
    the first so many; pairs of other experts stay in both. Waits for no device."""
    gpu, cpu = ids.clone(), ids.clone()
    for expert, count in split.items():
        mine = ids == expert
        first = mine & (mine.flatten().cumsum(0).view_as(ids) <= count)
        cpu.masked_fill_(first, nobody)
        gpu.masked_fill_(mine & ~first, nobody)
    return gpu, cpu


def with_nobody(blocks: torch.Tensor) -> torch.Tensor:
    """Block addresses `[E]` -> `[E + 1]`: pairs of the id E, which is no expert's, are nobody's to the CPU kernels."""
    return torch.cat((blocks, blocks.new_zeros(1)))


class TokenLoads(dict):
    """Token loads by expert, and the same as native code reads them: `packed` holds the experts and their loads as int64. Not changed once made."""

    packed: tuple[bytes, bytes]


def active_loads(loads: torch.Tensor) -> TokenLoads:
    """Token loads, int `[E]` on the host -> those of the experts that have any, by expert."""
    counts = loads.numpy()  # on so little, a third of torch's time
    (active,) = counts.nonzero()
    counts = counts[active]
    found = TokenLoads(zip(active.tolist(), counts.tolist(), strict=True))
    found.packed = active.tobytes(), counts.astype("int64").tobytes()
    return found


class CopyFailed(RuntimeError):
    """An exact copy could not be issued: nothing is under way, and its slot holds nothing usable. Returned, not raised: the
    copies asked for with it go on."""


class Event(Protocol):
    """A point on a lane. Its times are known once it is done."""


def wait_for(*events: Event | None) -> tuple[Event, ...]:
    """The order of an operation, spelled out: it starts after each of these. None stands for what is known to be done.

    Every order that the engine asks for is an argument of this function, so that a test can find and remove each.
    """
    return tuple(event for event in events if event is not None)


class SpeculativeCopy(NamedTuple):
    """One entry of the speculative queue: `expert` of `layer` into `slot`."""

    layer: int
    expert: int
    slot: int


@dataclass(frozen=True)
class Running:
    """The speculative copy that was under way when speculation was stopped; `left` is its uncopied fraction."""

    copy: SpeculativeCopy
    left: float
    token: Any


@dataclass(frozen=True)
class Stopped:
    """What a stop found: copies that have landed, with their events, the running one, and those that failed (their slots hold
    nothing usable). The rest was dropped."""

    landed: Sequence[tuple[SpeculativeCopy, Event]] = ()
    running: Running | None = None
    failed: Sequence[SpeculativeCopy] = ()


@dataclass(frozen=True)
class Ticket:
    """A prediction on its way: `event` ends the work on the side stream, `result` is the device's own."""

    event: Event
    result: Any


class Device(Protocol):
    """The operations of one layer. None blocks the host but `read_back`; each returns the event of its end."""

    name: str
    modelled: bool  # times come from a hardware file, not from a clock
    host_runs_empty: bool  # the CPU path is paid even where it has no expert
    sums_in_order: bool  # a token's rows are added in one order, whatever the plan: nothing may be accumulated

    def begin_layer(self, at: At) -> None:
        """Marks the dense work before this layer's router (attention)."""

    def read_back(self, at: At, rows: Rows) -> dict[int, int]:
        """Token loads of the active experts, on the host; those of each of `rows.parts` too, in its `loads`. The routing
        event; the only blocking sync of a layer.

        Everything before it on the compute stream is done when it returns. So a slot that the engine gives to a copy has
        no reader left: victims are never active in this layer, and earlier layers' kernels have ended.
        """

    def stop_speculation(self, at: At, through: int) -> Stopped:
        """Ends the speculative queue of layers up to `through`: nothing new of them starts, and what has landed of any layer
        and what runs of them is returned. Copies for later layers go on (they were asked for after a step)."""

    def keep(self, at: At, running: Running) -> Event:
        """Lets the running speculative copy finish; exact copies queue behind it."""

    def abandon(self, at: At, running: Running) -> None:
        """Drops the running speculative copy; its slot then holds nothing usable."""

    def run_host(self, at: At, rows: Rows, experts: Sequence[int], loads: Mapping[int, int], after: Sequence[Event] = ()) -> Event:
        """CPU grouped FFN of `experts`: rows there, weighted rows back into `rows.pairs`; in the order of the calls."""

    def copy_experts(self, at: At, places: Mapping[int, int], after: Sequence[Event] = ()) -> Sequence[Event | CopyFailed]:
        """Exact copies of this layer's experts into slots (expert -> slot), in that order and behind those of earlier calls. Several copies may have
        one event, done when all of them are."""

    def run_slots(self, at: At, rows: Rows, slots: Mapping[int, int], loads: Mapping[int, int], kind: str, after: Sequence[Event]) -> Event:
        """GPU grouped FFN of the experts in `slots` (expert -> slot), weighted rows into `rows.pairs`."""

    def divide(self, rows: Rows, split: Mapping[int, int]) -> None:
        """Before anything of `rows` runs: `Rows.divide`, with the ids of both shares."""

    def predict(self, at: At, rows: Rows, routers: Sequence[Router]) -> Ticket:
        """Starts the following layers' own routing functions, nearest first, on this layer's MoE input, on the side stream."""

    def take_prediction(self, ticket: Ticket) -> Sequence[Predicted] | None:
        """What a `predict` call found for each of its routers, or None where it is not there yet."""

    def speculate(self, at: At, queue: Sequence[SpeculativeCopy], after: Sequence[Event] = ()) -> None:
        """Hands the channel a queue to serve in order after the exact copies, ahead of what it still has, until `stop_speculation`."""

    def accumulate(self, at: At, rows: Rows, experts: Sequence[int]) -> Event:
        """On the compute stream, after the `run_slots` of a wave: adds the rows of `experts` to the sums of a part's tokens, which
        start from these where `rows` is not `summed` yet."""

    def combine(self, at: At, rows: Rows, experts: Iterable[int], out: torch.Tensor | None, shared: torch.Tensor | None,
                after: Sequence[Event]) -> Event:
        """On the compute stream, after the layer's `run_slots`: sums `rows.pairs` over top-k in fixed order, adds `shared`,
        writes `out [T, H]`. `experts` are those with rows in the part: its active ones, or what the sums of a `summed` part lack."""

    def load_initial(self, layer: int, expert: int, slot: int) -> None:
        """Fills a slot before the first step; not part of any timeline."""

    def synchronize(self) -> None:
        """Blocks until everything asked for is done, the speculative queue excepted; at a restart or between steps, never in a layer."""

    def channel_wait_ms(self) -> float:
        """How long the channel stays busy before an exact copy asked for now could start."""

    def done(self, event: Event) -> bool:
        """Whether the host knows the event to be done; never waits."""

    def span_ms(self, event: Event) -> tuple[float, float] | None:
        """(start, end) of the operation that `event` ends, in ms of the device's clock; None while unknown."""

    def now_ms(self) -> float:
        """The host's time on the device's clock."""

    def close(self) -> None:
        """Stops what the device started. It cannot be used afterwards."""
