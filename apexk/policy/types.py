"""What a policy sees and what it returns: integers, sets and milliseconds; no tensors, no clock.

Words as in the paper: an expert's *token load* is the number of (token, expert) pairs routed to it in this step; a
*missed* expert is active but not resident; the *transfer count* p is how many missed experts are copied to the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Phase = Literal["prefill", "decode"]


class Costs(Protocol):
    """A frozen estimate of what work costs now, in milliseconds. A decision depends on nothing else that is measured."""

    def cpu_ms(self, experts: int, pairs: int) -> float:
        """CPU path: hand-over, grouped FFN and results back, for `pairs` rows over `experts` experts."""

    def copy_ms(self, copies: int) -> float:
        """`copies` exact transfers, the first one's set-up included; 0 for none."""

    def gpu_ms(self, experts: int, pairs: int) -> float:
        """GPU grouped FFN over slots, transfers not included."""

    def as_dict(self) -> dict:
        """JSON form; `apexk.policy.costs_from_dict` reads it back exactly (replay)."""


@dataclass(frozen=True)
class ModelShape:
    """The MoE part of a model: `layers` sparse layers of `experts` experts each, `topk` of them per token."""

    layers: int
    experts: int
    topk: int


@dataclass(frozen=True)
class InFlight:
    """A speculative copy of this layer that was under way at the routing event; `left` is its uncopied fraction (0..1)."""

    expert: int
    left: float


@dataclass(frozen=True)
class RouteView:
    """One layer at its routing event: the exact demand, what is resident, and what work costs.

    `loads` maps every active expert to its token load (> 0); where it has an attribute `packed`, that holds its keys and values in order as int64
    bytes, for the native scan. `resident` holds experts whose copy has landed.
    `available` is the number of slots that exact copies may take (free or evictable). `in_flight` is set when the
    engine keeps a running speculative copy that this layer needs. `channel_wait_ms` is how long the transfer channel
    stays busy before a first exact copy can start. With `resident_first` the GPU runs resident experts during the
    copies; without it everything waits for them. `memory` holds what else the policy remembered for this decision, as JSON
    values (`Policy.recall`).
    """

    step: int
    layer: int
    phase: Phase
    tokens: int
    loads: Mapping[int, int]
    resident: frozenset[int]
    available: int
    costs: Costs
    in_flight: InFlight | None = None
    channel_wait_ms: float = 0.0
    resident_first: bool = True
    memory: Mapping | None = None

    def missed(self) -> list[int]:
        """Active experts that are not resident, heaviest first, ties by lower id."""
        return sorted((e for e in self.loads if e not in self.resident), key=lambda e: (-self.loads[e], e))


@dataclass(frozen=True)
class Plan:
    """Where each active expert runs. `gpu_resident`, `exact_fetch` (in copy order) and `cpu` partition the active set.

    `split` names experts of the first two that both sides compute, as (expert, n): the GPU the first n of its pairs, in the
    order of the tokens, the CPU the others; 0 < n < the expert's load.
    `estimates` holds (estimated CPU ms, estimated GPU ms) for each transfer count considered, in order; empty for
    policies that do not estimate.
    """

    gpu_resident: tuple[int, ...]
    exact_fetch: tuple[int, ...]
    cpu: tuple[int, ...]
    est_cpu_ms: float | None = None
    est_gpu_ms: float | None = None
    estimates: tuple[tuple[float, float], ...] = ()
    split: tuple[tuple[int, int], ...] = ()

    @property
    def transfer_count(self) -> int:
        return len(self.exact_fetch)


@dataclass(frozen=True)
class Prediction:
    """The next MoE layer's demand as predicted by its own router from this layer's MoE input.

    `loads` maps each predicted expert to its number of tokens, `scores` to the sum of its predicted routing weights.
    """

    loads: Mapping[int, int]
    scores: Mapping[int, float]


@dataclass(frozen=True)
class Observation:
    """What one layer really took, in milliseconds; a part that did no work has a time of None."""

    cpu_experts: int = 0
    cpu_pairs: int = 0
    cpu_ms: float | None = None
    gpu_experts: int = 0
    gpu_pairs: int = 0
    gpu_ms: float | None = None
    copies: int = 0
    copy_ms: float | None = None
    layer: int = 0
    path_ms: float | None = None  # routing event to the end of the longer path
    unassigned_ms: float | None = None  # what the plan estimated for the longer path without a copy; None: it did not estimate


@dataclass(frozen=True)
class PolicyOptions:
    """Tunable numbers of the policies; defaults as documented, overridden by a hardware file or the user."""

    cost: Literal["affine", "rates"] = "affine"
    rate_ema: float = 0.2
    forgetting: float = 0.995
    utility_decay: float = 0.5
    evict: str | None = None  # a rule of `apexk.policy.evict`; None: the policy's own

    def __post_init__(self):
        if self.cost not in ("affine", "rates"):
            raise ValueError(f"cost is {self.cost!r}; there are 'affine' and 'rates'")
        for name, zero_ok in (("rate_ema", False), ("forgetting", False), ("utility_decay", True)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0.0 <= value <= 1.0 or (value == 0.0 and not zero_ok):
                raise ValueError(f"{name} is {value!r}; it must lie in {'[' if zero_ok else '('}0, 1]")


@dataclass(frozen=True)
class CostPrior:
    """Starting point of the cost models, in ms: CPU `c0 + a*experts + b*pairs`, copies `s0 + t1*p`, GPU `g0 + g1*experts + g2*pairs`."""

    c0: float
    a: float
    b: float
    s0: float
    t1: float
    g0: float
    g1: float
    g2: float
    cpu_fixed_when_empty: bool = False
