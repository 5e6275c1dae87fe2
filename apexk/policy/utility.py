"""Utilities of a layer's experts, by which residents give up their slots: the paper's, and ours, which learns.

`u <- gamma*u + n` at the end of the layer in each step, n its token load (0 if inactive). It starts from popularity, scaled so
that the layer's total equals the first load seen. Decay is applied on reading, by gamma^(steps since the last update).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import log1p

from .cost_affine import solve
from .native import utility as native
from .native.utility import State


class Rule:
    """What all eviction rules have; each has `update(step, loads)`, `lowest(candidates, count, step)` and `keys(layer, experts, step)`."""

    def leave(self, expert: int) -> None:
        """The expert, one of another layer's victims, is evicted; `lowest` says so itself."""


class LayerUtility(Rule):
    """Utilities of one layer's experts. `popularity` (>= 0 each, any unit) may be None: all start at zero."""

    logs = False  # of loads are added

    def __init__(self, experts: int, decay: float, popularity: Sequence[float] | None = None):
        total = sum(popularity) if popularity is not None else 0
        self.decay = decay
        self.powers = array("d", [1.0])  # decay**n, as far as it was asked for
        self.value = array("d", [p / total for p in popularity] if total else [0.0] * experts)
        self.seeded = not total  # until the first loads, values are shares of the layer's load
        self.active = array("q", [-1]) * experts  # last step with a token, which `value` is as of; -1 before any

    def update(self, step: int, loads: Mapping[int, float]) -> None:
        """End of the layer in `step`; steps must not go back."""
        if not self.seeded and loads:
            total = sum(loads.values())
            self.value = array("d", [v * total for v in self.value])
            self.seeded = True
        self.add(step, loads)

    def add(self, step: int, loads: Mapping[int, float]) -> tuple[float, float, float, float]:
        """Utilities as of `step`, its loads y (their logs, with `logs`) in them; returns the sums of y, y*y, y*u and y*standing over the active experts."""
        state = self._state(step)
        return native.update(state, step, loads, self.logs) or update_ref(state, step, loads, self.logs)

    def read(self, expert: int, step: int) -> float:
        """Utility as decayed to `step`; in tokens once the layer has run."""
        return decayed(self._state(step), step, expert)

    def lowest(self, candidates: Collection[int], count: int, step: int) -> tuple[int, ...]:
        """The `count` least useful candidates, worst first; ties: longest inactive, then lowest id. Fewer if there are fewer."""
        if count <= 0 or not candidates:
            return ()
        state = self._state(step)
        return native.lowest(state, step, candidates, count) or lowest_ref(state, step, candidates, count)

    def keys(self, layer: int, experts: Iterable[int], step: int) -> list[tuple]:
        """For victims of several layers: the smallest goes first, the last item is the expert; `step` is the layer's next."""
        state = self._state(step)
        return [(rank(state, step, e), self.active[e], layer, e) for e in experts]

    def _state(self, step: int) -> State:
        powers = self.powers
        while len(powers) <= step + 1:
            powers.append(self.decay ** len(powers))
        return State(self.value, self.active, powers)


class LearntUtility(LayerUtility):
    """`learnt`: fast utility plus standing popularity, in a proportion that each layer learns while it runs. Ours.

        u <- gamma*u + log(1 + n)        value = u + w*s        s = log(1 + popularity)

    popularity scaled as for `utility`: the layer's total equals the first load seen.

    What an expert did lately tells of the text's topic, popularity of the model, and how much of either carries over to the
    next step differs between layers and texts. `w` is the ratio c/b in the least-squares line a + b*u + c*s for the next
    step's log(1 + n), over all experts of the layer, older steps counting less by `KEEP`; it is held between 0 and `MOST`.
    Its sums are updated from active experts alone: u of all others only decays. Without popularity it is `utility` with
    concave loads.
    """

    KEEP = 0.98  # of the line's sums, a step
    FIRST, MOST = 0.5, 4.0  # of w
    SAMPLES = 3  # steps before the line is believed
    RIDGE = 1e-6  # keeps the line defined where popularity says nothing
    logs = True

    def __init__(self, experts: int, decay: float, popularity: Sequence[float] | None = None):
        super().__init__(experts, decay, None)
        total = sum(popularity) if popularity is not None else 0
        self.share = [p / total for p in popularity] if total else None
        self.standing = array("d", self.share or [0.0] * experts)  # s; until the first loads tell the layer's total: shares
        self.standing_sums: tuple[float, float, float] | None = None  # over all experts: 1, s, s*s
        self.utility_sums = [0.0, 0.0, 0.0]  # over all experts: u, u*u, u*s, as of the end of step `learnt`
        self.weight, self.samples, self.learnt = self.FIRST, 0, -1
        self.sums = [0.0] * 9  # of the line's normal equations, as `solve` takes them

    def update(self, step: int, loads: Mapping[int, int]) -> None:
        """One sample of every expert for the line: (1, u as decayed to this step, s) -> y, its log(1 + n) in this step."""
        if self.standing_sums is None and self.share and loads:
            total = sum(loads.values())
            self.standing = array("d", [log1p(share * total) for share in self.share])
            self.standing_sums = (len(self.standing), sum(self.standing), sum([s * s for s in self.standing]))
        sums = self.add(step, loads)
        if self.standing_sums:
            self._learn(step, *sums)

    def _state(self, step: int) -> State:
        return super()._state(step)._replace(standing=self.standing, weight=self.weight)

    def _learn(self, step: int, sum_y: float, sum_yy: float, sum_uy: float, sum_sy: float) -> None:
        kept = self.powers[step - self.learnt]
        sum_u, sum_uu, sum_us = self.utility_sums
        sum_u, sum_uu, sum_us = kept * sum_u, kept * kept * sum_uu, kept * sum_us
        experts, sum_s, sum_ss = self.standing_sums
        if self.samples:  # before the first there is no u
            keep = self.KEEP
            newest = (experts, sum_u, sum_s, sum_y, sum_uu + self.RIDGE, sum_us, sum_uy, sum_ss + self.RIDGE, sum_sy)
            self.sums = [keep * old + new for old, new in zip(self.sums, newest, strict=True)]
        if self.samples >= self.SAMPLES:
            _, b, c = solve(self.sums)
            self.weight = min(self.MOST, max(0.0, c / b)) if b > 0 else self.MOST
        self.samples += 1
        self.utility_sums, self.learnt = [sum_u + sum_y, sum_uu + 2 * sum_uy + sum_yy, sum_us + sum_sy], step


def decayed(state: State, step: int, expert: int) -> float:
    """The expert's utility as of `step`."""
    return state.value[expert] * state.powers[step - state.active[expert]]


def rank(state: State, step: int, expert: int) -> float:
    """What experts are compared by."""
    utility = decayed(state, step, expert)
    return utility + state.weight * state.standing[expert] if state.standing is not None else utility


def update_ref(state: State, step: int, loads: Mapping[int, float], logs: bool) -> tuple[float, float, float, float]:
    """`native.update` in Python, and for loads that are no whole numbers."""
    sum_y = sum_yy = sum_uy = sum_sy = 0.0
    for expert, load in loads.items():
        y, u = log1p(load) if logs else load, decayed(state, step, expert)
        sum_y, sum_yy, sum_uy = sum_y + y, sum_yy + y * y, sum_uy + y * u
        if state.standing is not None:
            sum_sy += y * state.standing[expert]
        state.value[expert] = u + y
        state.active[expert] = step
    return sum_y, sum_yy, sum_uy, sum_sy


def lowest_ref(state: State, step: int, experts: Collection[int], count: int) -> tuple[int, ...]:
    """`native.lowest` in Python."""
    ranked = sorted([(rank(state, step, e), state.active[e], e) for e in experts])
    return tuple([expert for _, _, expert in ranked[:count]])
