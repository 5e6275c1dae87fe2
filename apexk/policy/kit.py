"""What every policy must keep, as one call: run a policy of your own through random layers and find out.

    from apexk.policy.kit import check_policy
    check_policy(lambda: MyPolicy(), traces=1000)

Checked, with nothing but integers: each plan is valid and partitions the active set, every (token, expert) pair is placed
once, those of a split expert on both sides, the same view gives the same plan again, after a trip through JSON, and by a policy made new, victims come from the candidates and are
never in use, the pool never overflows, prefetches name absent experts only, a policy that says it does not fetch or
prefetch does not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from .base import Policy
from .check import check_plan
from .evict import exact_candidates, prefetch_candidates
from .registry import require_contract
from .replay import view_from_dict, view_to_dict
from .types import CostPrior, InFlight, ModelShape, Observation, Plan, Prediction, RouteView

PRIOR = CostPrior(c0=0.3, a=0.02, b=0.02, s0=0.2, t1=0.3, g0=0.1, g1=0.01, g2=0.001)


class PolicyFault(AssertionError):
    """A policy broke a rule; the message says which, with the seed that shows it."""


@dataclass
class Seen:
    """What a check ran over."""

    traces: int = 0
    layers: int = 0
    pairs: int = 0
    copies: int = 0
    splits: int = 0


def check_policy(make: Callable[[], Policy], *, traces: int = 200, seed: int = 0, experts: int = 12, layers: int = 3, steps: int = 3,
                 topk: int | None = None) -> Seen:
    """Runs `traces` random traces, each with a pool of its own size (0..experts) and, unless given, a `topk` of its own. Raises `PolicyFault`."""
    seen = Seen()
    for number in range(traces):
        draw = random.Random(seed * 1_000_003 + number)
        try:
            _trace(make, draw, seen, ModelShape(layers, experts, topk or draw.randint(1, 4)), steps)
        except Exception as error:
            raise PolicyFault(f"seed {seed}, trace {number}: {type(error).__name__}: {error}") from error
        seen.traces += 1
    return seen


def _trace(make: Callable[[], Policy], draw: random.Random, seen: Seen, shape: ModelShape, steps: int) -> None:
    policy = make()
    require_contract(type(policy).__name__, type(policy))
    capacity = draw.randint(0, shape.experts)
    popularity = [[draw.randint(0, 9) for _ in range(shape.experts)] for _ in range(shape.layers)] if draw.random() < 0.7 else None
    policy.start(shape, capacity, PRIOR, popularity, seed=draw.randint(0, 9))
    scope = draw.choice(policy.pool_scopes)
    first = [policy.initial(layer) for layer in range(shape.layers)]
    for residents in first:
        _need(len(set(residents)) == len(residents) and set(residents) <= set(range(shape.experts)), f"initial residents {residents}")
    counts = list(map(len, first))
    _need(sum(counts) <= capacity * shape.layers and (scope == "global" or max(counts) <= capacity), f"{counts} initial residents, {capacity} slots a layer")
    pools = Pools(policy, [set(residents) for residents in first], capacity + policy.extra_slots(capacity), scope == "global")
    for step in range(steps):
        phase = draw.choice(("prefill", "decode"))
        tokens = draw.choice((1, 2, 8, 40))
        for layer in range(shape.layers):
            active = _layer(policy, draw, seen, shape, step, layer, phase, tokens, pools, make())
            for later in range(layer + 1, min(layer + 1 + policy.look_ahead, shape.layers)):
                _prefetch(policy, draw, shape, step, layer, later, active, pools)
        _after_step(policy, step, pools)


class Pools:
    """Residents by layer, in `slots` a layer: its own, or `shared` by all."""

    def __init__(self, policy: Policy, residents: list[set[int]], slots: int, shared: bool):
        self.residents, self.shared = residents, shared
        self._policy, self._slots = policy, slots

    def free(self, layer: int) -> int:
        if self.shared:
            return self._slots * len(self.residents) - sum(map(len, self.residents))
        return self._slots - len(self.residents[layer])

    def idle(self, layer: int, spared: Collection[int]) -> dict[int, set[int]]:
        """What an exact copy for `layer` may evict, by layer."""
        layers = range(len(self.residents)) if self.shared else (layer,)
        return {at: exact_candidates(self.residents[at], spared if at == layer else (), ()) for at in layers}

    def victims(self, layer: int, idle: dict[int, set[int]], count: int, step: int) -> list[tuple[int, int]]:
        if self.shared:
            out = list(self._policy.victims_anywhere(layer, idle, count, step))
        else:
            out = [(layer, e) for e in self._policy.victims(layer, idle[layer], count, step)]
        _check_victims(out, [(at, e) for at, experts in idle.items() for e in experts])
        return out

    def replace(self, out: Iterable[tuple[int, int]], layer: int, new: Iterable[int]) -> None:
        for at, expert in out:
            self.residents[at].remove(expert)
        self.residents[layer].update(new)
        _need(self.free(layer) >= 0, f"{-self.free(layer)} more experts than slots")


def _layer(policy, draw, seen, shape, step, layer, phase, tokens, pools, fresh) -> Collection[int]:
    loads, pool = _loads(draw, shape, tokens), pools.residents[layer]
    idle = sum(map(len, pools.idle(layer, loads).values()))
    absent = [e for e in sorted(loads) if e not in pool]
    in_flight = None
    if policy.waits_in_flight and absent and pools.free(layer) and draw.random() < 0.3:
        in_flight = InFlight(draw.choice(absent), draw.random())
    free = pools.free(layer) - (in_flight is not None)
    view = RouteView(
        step, layer, phase, tokens, loads, frozenset(pool), free + idle, policy.costs(phase), in_flight, 0.0 if in_flight else draw.random(),
        policy.resident_first is None and draw.random() < 0.5, policy.recall(layer, phase, loads),
    )  # fmt: skip
    plan = policy.on_route(view)
    check_plan(view, plan, policy.waves, policy.name)
    _check_choice(policy, view, plan)
    split = dict(plan.split)
    on_gpu = sum(split.get(e, loads[e]) for e in (*plan.gpu_resident, *plan.exact_fetch))
    on_cpu = sum(loads[e] for e in plan.cpu) + sum(loads[e] - n for e, n in plan.split)
    placed = on_gpu + on_cpu
    _need(placed == tokens * shape.topk, f"{placed} of {tokens * shape.topk} pairs are placed")
    again = view_from_dict(json.loads(json.dumps(view_to_dict(view))))
    _need(policy.on_route(again) == plan, "the recorded view gives another plan")
    _need(fresh.on_route(again) == plan, "a fresh policy decides the recorded view otherwise: `recall` must hold what a decision rests on")
    _fetch(policy, view, plan, pools)
    policy.on_layer_done(layer, step, phase, loads)
    experts = len(plan.cpu) + len(split)
    policy.observe(phase, Observation(experts, on_cpu, 0.3 + 0.02 * on_cpu if on_cpu else None, 1, 1, draw.random(), plan.transfer_count, draw.random()))
    seen.layers, seen.pairs, seen.copies = seen.layers + 1, seen.pairs + placed, seen.copies + plan.transfer_count
    seen.splits += len(split)
    return loads.keys()


def _check_choice(policy: Policy, view: RouteView, plan: Plan) -> None:
    _need(not plan.exact_fetch or policy.fetches, "says that it does not fetch, and fetches")
    _need(not (plan.cpu or plan.split) or policy.uses_cpu, "says that it does not use the CPU, and does")


def _fetch(policy: Policy, view: RouteView, plan: Plan, pools: Pools) -> None:
    if not policy.keeps_fetched:
        return
    new, spared, held = list(plan.exact_fetch), set(view.loads), policy.holds(view)
    while new:
        idle = pools.idle(view.layer, spared)
        room = pools.free(view.layer) + sum(map(len, idle.values()))
        _need(room > 0 or spared is not held, "no slot is left for a copy")
        wave, new, spared = new[:room], new[room:], held
        pools.replace(pools.victims(view.layer, idle, max(0, len(wave) - pools.free(view.layer)), view.step), view.layer, wave)


def _prefetch(policy: Policy, draw: random.Random, shape: ModelShape, step: int, layer: int, later: int, active: Collection[int], pools: Pools) -> None:
    if not policy.speculates:
        return
    loads, pool = _loads(draw, shape, 8), pools.residents[later]
    queue = policy.on_predict(later, Prediction(loads, {e: draw.random() for e in loads}), frozenset(pool))
    _need(len(set(queue)) == len(queue) and not set(queue) & pool and set(queue) <= set(range(shape.experts)), f"queue {queue} for residents {pool}")
    free, candidates = pools.free(later), prefetch_candidates(pool, loads, (), (), ())
    if pools.shared:
        out = pools.victims(layer, pools.idle(layer, active) | {later: candidates}, max(0, len(queue) - free), step)
    else:
        out = [(later, e) for e in policy.victims_for(later, queue[free:][: len(candidates)], candidates, step)]
        _check_victims(out, [(later, e) for e in candidates])
    landed = draw.randint(0, min(len(queue), free + len(out)))
    pools.replace(out[: max(0, landed - free)], later, queue[:landed])


def _after_step(policy: Policy, step: int, pools: Pools) -> None:
    wanted: dict[int, list[int]] = {}
    for layer, expert in policy.on_step_done(step):
        wanted.setdefault(layer, []).append(expert)
    _need(not wanted or policy.posts, "says that it copies nothing after a step, and does")
    for layer, queue in wanted.items():
        pool = pools.residents[layer]
        queue = [e for e in queue if e not in pool]
        free, candidates = pools.free(layer), set(pool)
        out = policy.victims_for(layer, queue[free:][: len(candidates)], candidates, step + 1)
        _check_victims(out, candidates)
        pools.replace([(layer, e) for e in out], layer, queue[: free + len(out)])


def _loads(draw: random.Random, shape: ModelShape, tokens: int) -> dict[int, int]:
    loads: dict[int, int] = {}
    for _ in range(tokens):
        for expert in draw.sample(range(draw.choice((shape.topk, shape.experts))), shape.topk):
            loads[expert] = loads.get(expert, 0) + 1
    return loads


def _check_victims(out, candidates) -> None:
    _need(len(set(out)) == len(out) and set(out) <= set(candidates), f"victims {out} of candidates {sorted(candidates)}")


def _need(true: bool, what: str) -> None:
    if not true:
        raise PolicyFault(what)
