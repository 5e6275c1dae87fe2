"""Several GPUs, modelled: each with slots, a copy channel and a compute stream of its own, one CPU, one clock.

    SeveralGpus(machine, timeline, bytes, gpus=4, policy=policy, further=8)

Slot s of the pool is on GPU s mod n; the expert that the engine puts there has its home there. A GPU has room for `further` more experts a
layer: copies of experts that have a home elsewhere (`Policy.replicate` names them). A launch puts each expert's pairs on its home, or over all GPUs
that hold a copy so that they end together; a GPU on which none run launches nothing. Rows go between the GPUs before the merge (`exchange` of the
hardware file, an assumption): a fixed part, and one for each pair that the busiest GPU has of a token that is not its own (n-1 of n are not).
The layer ends when the slowest GPU and the CPU are done. Attention, router and merge take on n GPUs what they take on one.

Not modelled: links between GPUs that are shared or differ, transfers from GPU to GPU (every copy comes from the host), host memory that n channels
share, parallel attention. Of the prefetches that run at a routing event the one with the least left may be waited for, the others are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from apexk.device.base import At, Router, Rows, Running, SpeculativeCopy, Stopped, Ticket
from apexk.device.virtual import NS, Span, VirtualDevice
from apexk.hardware import Hardware
from apexk.policy.base import Policy
from apexk.policy.check import PlanError
from apexk.policy.types import Prediction
from apexk.timeline.writer import Timeline


class OneOfSeveral(VirtualDevice):
    """One GPU's lanes."""

    def agree(self, ns: int) -> None:
        """The host's clock is at `ns`."""
        self._now = max(self._now, ns)

    def copy_aside(self, at: At, layer: int, expert: int) -> Span:
        """A copy of an expert into room that is none of the pool's slots, at the channel's next turn."""
        start = max(self._now, self._free["h2d"])
        span = Span(start, start + round(self.hardware.copy_ms(speculative=True, first=True) * NS))
        self._free["h2d"] = span.end
        self._row("copy.spec", "h2d", at, span, layer=layer, bytes=self._bytes, experts=[expert])
        return span

    def exchange(self, at: At, ms: float, gpus: Sequence[OneOfSeveral]) -> None:
        """Rows between the GPUs, once all of them are done; the merge comes after it."""
        self._run("gpu", "host.rows", at, ms, [Span(0, gpu._free["gpu"]) for gpu in gpus])

    def merged(self, ns: int) -> None:
        """The first GPU's merge ends the layer on all, so that their clocks stay together."""
        self._free["gpu"] = max(self._free["gpu"], ns)


class SeveralGpus:
    """`policy` is asked for further copies; `further` experts a layer fit on each GPU beside the pool's slots. Computes no tensors."""

    name = "virtual"
    modelled = True
    sums_in_order = False

    def __init__(self, machine: Hardware, timeline: Timeline, bytes_per_expert: int, *, gpus: int, policy: Policy, further: int = 0):
        if machine.exchange is None:
            raise ValueError(f"hardware {machine.name} has no section 'exchange', so it says nothing of rows that go between {gpus} GPUs")
        self._gpus = [OneOfSeveral(machine, timeline if gpu == 0 else OfGpu(timeline, gpu), bytes_per_expert) for gpu in range(gpus)]
        self._machine, self._policy, self._room = machine, policy, further
        self.host_runs_empty = self._gpus[0].host_runs_empty
        self._home: dict[int, tuple[int, int]] = {}  # by slot: (layer, expert)
        self._further: dict[int, dict[int, dict[int, Span]]] = {}  # by layer and expert: GPU -> its further copy
        self._pairs = [0] * gpus  # of this layer
        self.busiest = self.pairs = 0  # pairs of each layer's busiest GPU, and of all

    def begin_layer(self, at: At) -> None:
        for gpu in self._gpus:
            gpu.begin_layer(at)

    def read_back(self, at: At, rows: Rows) -> Mapping[int, int]:
        loads = [gpu.read_back(at, rows) for gpu in self._gpus][0]
        self._pairs = [0] * len(self._gpus)
        return loads

    def stop_speculation(self, at: At, through: int) -> Stopped:
        found = [gpu.stop_speculation(at, through) for gpu in self._gpus]
        running = sorted((stopped.running.left, number) for number, stopped in enumerate(found) if stopped.running)
        failed = []
        for _, number in running[1:]:
            self._gpus[number].abandon(at, found[number].running)
            failed.append(found[number].running.copy)
        kept = None
        if running:
            number = running[0][1]
            kept = replace(found[number].running, token=(number, found[number].running))
        landed = [one for stopped in found for one in stopped.landed]
        for copy, _ in landed:
            self._home[copy.slot] = copy.layer, copy.expert
        return Stopped(landed, kept, failed)

    def keep(self, at: At, running: Running) -> Span:
        number, inner = running.token
        self._home[inner.copy.slot] = inner.copy.layer, inner.copy.expert
        return self._gpus[number].keep(at, inner)

    def abandon(self, at: At, running: Running) -> None:
        number, inner = running.token
        self._gpus[number].abandon(at, inner)

    def run_host(self, at: At, rows: Rows, experts: Sequence[int], loads: Mapping[int, int], after: Sequence[Span] = ()) -> Span:
        return self._gpus[0].run_host(at, rows, experts, loads, after)

    def copy_experts(self, at: At, places: Mapping[int, int], after: Sequence[Span] = ()) -> list[Span]:
        spans: dict[int, Span] = {}
        for number, here in self._by_gpu(places).items():
            spans |= zip(here, self._gpus[number].copy_experts(at, here, after), strict=True)
        self._home |= {slot: (at.layer, expert) for expert, slot in places.items()}
        return [spans[expert] for expert in places]

    def run_slots(self, at: At, rows: Rows, slots: Mapping[int, int], loads: Mapping[int, int], kind: str, after: Sequence[Span]) -> Span:
        ready = max([self.now_ms() * NS, *(event.end for event in after)])
        further = self._further.get(at.layer, {})
        places = {e: {slot % len(self._gpus), *(gpu for gpu, copied in further.get(e, {}).items() if copied.end <= ready)} for e, slot in slots.items()}
        spans = []
        for number, shares in enumerate(balanced(places, loads, len(self._gpus), self._machine)):
            if shares:
                spans.append(self._gpus[number].run_slots(at, rows, {e: slots[e] for e in shares}, shares, kind, after))
                self._pairs[number] += sum(shares.values())
        return Span(min(span.start for span in spans), max(span.end for span in spans))

    def divide(self, rows: Rows, split: Mapping[int, int]) -> None:
        rows.divide(split)

    def predict(self, at: At, rows: Rows, routers: Sequence[Router]) -> Ticket:
        ticket = self._gpus[0].predict(at, rows, routers)
        if self._room and rows.predicted:
            self._replicate(at, at.layer + 1, Prediction(*rows.predicted[0]))
        return ticket

    def take_prediction(self, ticket: Ticket):
        return ticket.result

    def speculate(self, at: At, queue: Sequence[SpeculativeCopy], after: Sequence[Span] = ()) -> None:
        for number, gpu in enumerate(self._gpus):
            gpu.speculate(at, [copy for copy in queue if copy.slot % len(self._gpus) == number], after)

    def accumulate(self, at: At, rows: Rows, experts: Sequence[int]) -> Span:
        return self._gpus[0].accumulate(at, rows, experts)

    def combine(self, at: At, rows: Rows, experts, out, shared, after: Sequence[Span]) -> Span:
        gpus, exchange = self._gpus, self._machine.exchange
        moved = max(self._pairs) * (len(gpus) - 1) / len(gpus)
        if moved:
            gpus[0].exchange(at, exchange.e0 + exchange.e1 * moved, gpus)
        self.busiest += max(self._pairs)
        self.pairs += sum(self._pairs)
        merged = gpus[0].combine(at, rows, experts, out, shared, after)
        for gpu in gpus[1:]:
            gpu.merged(merged.end)
        return merged

    def load_initial(self, layer: int, expert: int, slot: int) -> None:
        self._home[slot] = layer, expert

    def synchronize(self) -> None:
        for gpu in self._gpus:
            gpu.synchronize()
        self._agree()

    def channel_wait_ms(self) -> float:
        return min(gpu.channel_wait_ms() for gpu in self._gpus)

    def done(self, event: Span) -> bool:
        return self._gpus[0].done(event)

    def span_ms(self, event: Span) -> tuple[float, float]:
        return self._gpus[0].span_ms(event)

    def now_ms(self) -> float:
        return self._gpus[0].now_ms()

    def close(self) -> None:
        for gpu in self._gpus:
            gpu.close()

    @property
    def imbalance(self) -> float:
        """Pairs of a layer's busiest GPU over those of the average one, over all layers; 1 where none ran."""
        return self.busiest * len(self._gpus) / self.pairs if self.pairs else 1.0

    def forget(self) -> None:
        """Counts `imbalance` from now on."""
        self.busiest = self.pairs = 0

    def _agree(self) -> None:
        """One clock: the host waited for every GPU."""
        now = max(gpu.now_ms() for gpu in self._gpus)
        for gpu in self._gpus:
            gpu.agree(round(now * NS))

    def _by_gpu(self, places: Mapping[int, int]) -> dict[int, dict[int, int]]:
        found: dict[int, dict[int, int]] = {}
        for expert, slot in places.items():
            found.setdefault(slot % len(self._gpus), {})[expert] = slot
        return found

    def _replicate(self, at: At, layer: int, prediction: Prediction) -> None:
        """Starts what `Policy.replicate` wants, each on the GPU that expects the least and has room and an idle channel."""
        further, gpus = self._further.setdefault(layer, {}), len(self._gpus)
        held = {e: len(places) for e, places in further.items() if places}
        wanted, idle = self._policy.replicate(layer, prediction, held)
        if len(set(wanted)) != len(wanted) or not held.keys() >= set(idle):
            raise PlanError(f"policy {self._policy.name!r} wants further copies of {tuple(wanted)} and gives up {tuple(idle)}; wanted different experts, and "
                            f"some of those that have further copies: {sorted(held)}")
        home = {expert: slot % gpus for slot, (at_layer, expert) in self._home.items() if at_layer == layer}
        expected = [0.0] * gpus
        for expert, load in prediction.loads.items():
            places = {home[expert], *further.get(expert, ())} if expert in home else ()
            for gpu in places:
                expected[gpu] += load / len(places)
        for expert in wanted:
            free = [gpu for gpu in range(gpus) if expert in home and gpu != home[expert] and gpu not in further.get(expert, ())
                    and not self._gpus[gpu].channel_wait_ms()]
            for gpu in sorted(free, key=lambda gpu: (expected[gpu], gpu)):
                here = [e for e, places in further.items() if gpu in places]
                given_up = next((e for e in idle if e in here), None)
                if len(here) >= self._room and given_up is None:
                    continue
                if len(here) >= self._room:
                    del further[given_up][gpu]
                further.setdefault(expert, {})[gpu] = self._gpus[gpu].copy_aside(at, layer, expert)
                expected[gpu] += prediction.loads.get(expert, 0) / (len(further[expert]) + 1)
                break


class OfGpu:
    """A timeline whose rows say which GPU they are of."""

    def __init__(self, inner: Timeline, gpu: int):
        self._inner, self._gpu = inner, gpu

    @property
    def active(self) -> bool:
        return self._inner.active

    def add(self, **row) -> None:
        self._inner.add(**row, gpu=self._gpu)


def balanced(places: Mapping[int, Collection[int]], loads: Mapping[int, int], gpus: int, machine: Hardware) -> list[dict[int, int]]:
    """By GPU: expert -> pairs. Experts with one place first; then, heaviest first, each with several over as many of its GPUs, the least busy ones, as
    end earliest: a further GPU reads the expert's weights once more (`g1`)."""
    g1, g2 = machine.gpu.g1, machine.gpu.g2
    shares: list[dict[int, int]] = [{} for _ in range(gpus)]
    busy = [0.0] * gpus
    for expert in sorted(places, key=lambda e: (len(places[e]) > 1, -loads[e], e)):
        pairs, found = loads[expert], sorted(places[expert], key=lambda gpu: (busy[gpu], gpu))
        best = None
        for count in range(1, min(len(found), pairs) + 1):
            here = level([busy[gpu] + g1 for gpu in found[:count]], pairs, g2)
            end = max(busy[gpu] + g1 + g2 * n for gpu, n in zip(found, here, strict=False))
            if best is None or end < best[0]:
                best = end, here
        for gpu, n in zip(found, best[1], strict=False):
            if n:
                shares[gpu][expert] = n
                busy[gpu] += g1 + g2 * n
    return shares


def level(starts: Sequence[float], pairs: int, each: float) -> list[int]:
    """`pairs` over GPUs that are free at `starts` (rising) and take `each` a pair, so that they end together as nearly as whole pairs allow."""
    if not each:
        return [pairs, *[0] * (len(starts) - 1)]
    used = next(n for n in range(len(starts), 0, -1) if n * starts[n - 1] - sum(starts[:n]) < pairs * each or n == 1)
    end = (pairs * each + sum(starts[:used])) / used
    exact = [(end - start) / each for start in starts[:used]]
    whole = [int(n) for n in exact]
    for i in sorted(range(used), key=lambda i: whole[i] - exact[i])[: pairs - sum(whole)]:
        whole[i] += 1
    return whole + [0] * (len(starts) - used)
