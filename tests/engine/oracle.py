"""An independent model of a run: the design's step-by-step description of one layer in plain loops and milliseconds.

Written from the description alone, without the engine: tests hold the engine's modelled times and transfers against it.
For the paper's machine (residents wait for copies, a running prefetch is aborted).
"""

from dataclasses import dataclass, field


@dataclass
class Oracle:
    hardware: object
    layers: int
    capacity: int
    exact: bool  # copies missed experts, as many as minimise the larger path
    speculative: bool
    decay: float
    resident: list = field(default_factory=list)  # sets
    now: float = 0.0
    channel_free: float = 0.0

    def start(self, initial, popularity, topk_total):
        self.resident = [set(initial(layer)) for layer in range(self.layers)]
        experts = len(popularity[0])
        self.use = [[popularity[layer][e] / sum(popularity[layer]) for e in range(experts)] for layer in range(self.layers)]
        self.seeded = [False] * self.layers
        self.last = [[-1] * experts for _ in range(self.layers)]
        self.figures = {"exact": 0, "speculative": 0, "hits": 0, "cpu_pairs": 0}

    def step(self, loads, predicted):
        """`loads[layer]` and `predicted[layer]` (expert -> (load, score)) of one pass; returns its time in ms."""
        hw, began, queue = self.hardware, self.now, []
        for layer in range(self.layers):
            routed = self.now + hw.layer.o_att
            self._prefetch(queue, layer, routed)
            n, here = loads[layer], self.resident[layer]
            hits = [e for e in n if e in here]
            missed = sorted((e for e in n if e not in here), key=lambda e: (-n[e], e))
            room = self.capacity - len(here) + sum(e not in n for e in here)
            wait = max(0.0, self.channel_free - routed)
            p = self._count(n, hits, missed, room, wait) if self.exact else 0
            cpu, gpu = self._paths(n, hits, missed, p, wait)
            if p:
                self.channel_free = routed + wait + hw.link.s0 + p * hw.link.t1
            for e in missed[:p]:
                if len(here) >= self.capacity:
                    here.remove(self._victim(layer, [v for v in here if v not in n]))
                here.add(e)
            self.figures["exact"] += p
            self.figures["hits"] += len(hits)
            self.figures["cpu_pairs"] += sum(n[e] for e in missed[p:])
            self.now = routed + hw.layer.kappa * max(cpu, gpu) + hw.layer.o_post
            self._learn(layer, n)
            queue = []
            if self.speculative and layer + 1 < self.layers and self.capacity:
                want = predicted[layer + 1]
                absent = [e for e in want if e not in self.resident[layer + 1]]
                absent.sort(key=lambda e: (-want[e][0], -want[e][1], e))
                queue = [(e, routed) for e in absent]
        return self.now - began

    def _prefetch(self, queue, layer, routed):
        hw, here, fresh = self.hardware, self.resident[layer], set()
        for e, asked in queue:
            start = max(self.channel_free, asked)
            if start >= routed:
                return
            if len(here) >= self.capacity:
                old = [v for v in here if v not in fresh]
                if not old:
                    return
                here.remove(self._victim(layer, old, before_step=True))
            self.figures["speculative"] += 1
            self.channel_free = start + hw.link.s_sp + hw.link.t1
            if self.channel_free > routed:
                self.channel_free = routed  # aborted: the slot is lost, nothing arrives
                return
            here.add(e)
            fresh.add(e)

    def _paths(self, n, hits, missed, p, wait):
        hw = self.hardware
        cpu = hw.cpu.c0 + hw.cpu.b * sum(n[e] for e in missed[p:])  # the fixed part is paid even when empty
        gpu = (wait + hw.link.s0 + hw.link.t1 * p) if p else 0.0
        if hits or p:
            gpu += hw.gpu.g0 + hw.gpu.g1 * (len(hits) + p) + hw.gpu.g2 * sum(n[e] for e in hits + missed[:p])
        return cpu, gpu

    def _count(self, n, hits, missed, room, wait):
        best, count = None, 0
        for p in range(min(len(missed), room) + 1):
            worst = max(self._paths(n, hits, missed, p, wait))
            if best is None or worst < best - 1e-12:
                best, count = worst, p
        return count

    def _victim(self, layer, candidates, before_step=False):
        return min(candidates, key=lambda e: (self._utility(layer, e), self.last[layer][e], e))

    def _utility(self, layer, e):
        return self.use[layer][e]

    def _learn(self, layer, n):
        if not self.seeded[layer]:
            self.use[layer] = [u * sum(n.values()) for u in self.use[layer]]
            self.seeded[layer] = True
        self.use[layer] = [self.decay * u + n.get(e, 0) for e, u in enumerate(self.use[layer])]
        self.stamp = getattr(self, "stamp", [0] * self.layers)
        for e in n:
            self.last[layer][e] = self.stamp[layer]
        self.stamp[layer] += 1
