"""Overheads in microseconds, each beside a yardstick of the same run.

`decide`, `check`, `launch` and `layer` are processor time of the thread that runs the model, so that waiting for the GPU and
other load on the machine do not count. The layer runs `CudaDevice` on the fake runtime with kernels that do nothing and
streams that wake no thread for what they can do at once: its own Python and native code, without the launch of a Triton kernel
and without the driver's part, which only a GPU can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from apexk import hardware
from apexk.device.base import Rows, active_loads
from apexk.device.cuda import CudaDevice
from apexk.device.gpu_kernels import ReferenceKernels
from apexk.device.native import latency
from apexk.device.native.fake import FakeCuda
from apexk.engine.layer import join, submit
from apexk.engine.observe import Observer
from apexk.engine.runtime import Engine, EngineSettings
from apexk.policy import registry
from apexk.policy.check import check_plan
from apexk.policy.types import CostPrior, ModelShape, PolicyOptions, RouteView
from apexk.store.block import ExpertBlock
from apexk.store.host_store import HostStore
from apexk.timeline.writer import Timeline

HIDDEN, INTERMEDIATE = 16, 8  # small: the fake runtime copies rows and experts within the call that asks for it
LAYERS, TOPK = 4, 10
#: (experts, tokens, most microseconds aimed for)
POLICY_CASES = ((256, 8, None), (512, 32, None), (512, 4096, 50.0))
LAYER_CASES = ((256, 8, None), (512, 32, 100.0))
#: of `apexk.device.native.latency`, which says what each is
NATIVE = {"hand_over": 50.0, "submit_call": None, "join_call": None, "copy_call": 20.0, "copy_8_call": None}


@dataclass(frozen=True)
class Row:
    """`us` is a median in microseconds; `yardsticks` the same as a multiple of the run's `yardstick`."""

    what: str  # decide | check (`policy_us`) | launch | layer (`layer_us`) | a key of `NATIVE`
    us: float
    yardsticks: float
    policy: str | None = None
    experts: int | None = None
    tokens: int | None = None
    goal_us: float | None = None

    def as_dict(self) -> dict:
        return asdict(self)


def rows(policies: Sequence[str], repeats: int) -> Iterator[Row]:
    """Every case under every policy of `policies`, then the native ones; each a median of about `repeats` (>= 1) samples."""
    unit = yardstick()
    for name in policies:
        for experts, tokens, goal in POLICY_CASES:
            decide, check = policy_us(name, experts, tokens, repeats)
            yield Row("decide", decide, decide / unit, name, experts, tokens, goal)
            yield Row("check", check, check / unit, name, experts, tokens)
        for experts, tokens, goal in LAYER_CASES:
            launched, whole = layer_us(name, experts, tokens, max(2, repeats // LAYERS))
            yield Row("launch", launched, launched / unit, name, experts, tokens, goal)
            yield Row("layer", whole, whole / unit, name, experts, tokens)
    native = latency.measure(repeats)
    for what, goal in NATIVE.items():
        yield Row(what, native[what + "_us"], native[what + "_us"] / unit, goal_us=goal)


class Silent(ReferenceKernels):
    """Counts tokens, which the engine needs, and computes nothing."""

    def ffn(self, *_) -> None: ...

    def rank(self, topk_ids, topk_weights, out) -> None:
        out.zero_()

    def take_rows(self, *_) -> None: ...

    def combine(self, *_) -> None: ...


class Stamped(CudaDevice):
    """Says when the engine first asked for a layer's prediction, thread time in ns: everything has been launched by then."""

    launched_ns: int | None = None

    def take_prediction(self, ticket):
        self.launched_ns = self.launched_ns or time.thread_time_ns()
        return super().take_prediction(ticket)


def yardstick() -> float:
    """Microseconds of thread time for a thousand look-ups in a dictionary: how fast this Python is here and now."""
    table = {n: n for n in range(1000)}
    return _median_us(lambda: [table[n] for n in range(1000)], 200)


def policy_us(name: str, experts: int, tokens: int, repeats: int) -> tuple[float, float]:
    """Medians of `on_route` and of the check of its plan in microseconds, a quarter of the experts resident."""
    policy = _policy(name, experts, experts // 4)
    loads = skewed_loads(experts, tokens)
    resident = frozenset(range(0, experts, 4))
    view = RouteView(step=0, layer=0, phase="decode", tokens=tokens, loads=loads, resident=resident, available=len(resident.difference(loads)) + 1,
                     costs=policy.costs("decode"), memory=policy.recall(0, "decode", loads))
    plan = policy.on_route(view)
    return _median_us(lambda: policy.on_route(view), repeats), _median_us(lambda: check_plan(view, plan, policy.waves), repeats)


def layer_us(name: str, experts: int, tokens: int, steps: int) -> tuple[float, float]:
    """Medians of one layer in microseconds, over `steps` steps of `LAYERS` layers: from the routing being on the host to
    everything launched, which the GPU may have to wait for, queueing what was predicted excepted; and of all of it: that, the
    read-back, the merge and learning from earlier layers' times, which mostly run beside the GPU's work."""
    block = ExpertBlock(HIDDEN, INTERMEDIATE, torch.bfloat16)
    store = HostStore(LAYERS, experts, block)
    for layer in range(LAYERS):
        store.blocks(layer).zero_()
    rule = {"activation": "silu", "weight_on_input": False}
    kernels = Silent(block, experts, torch.device("cpu"), **rule)
    device = Stamped(FakeCuda(eager=True), Timeline(None), store, experts // 4, kernels, topk=TOPK, threads=1, **rule)
    try:
        policy = _policy(name, experts, experts // 4)
        engine = Engine(ModelShape(LAYERS, experts, TOPK), experts // 4, device, policy, EngineSettings(), Timeline(None), block.payload_bytes)
        # another one learns from the fake's times, so that the plans stay those for a real machine's
        engine.observer = Observer(device, _policy(name, experts, experts // 4), engine.totals)
        taken, routed = [], []
        engine.recorder = lambda *_: routed.append(time.thread_time_ns())  # called once the routing is on the host
        for step in range(steps):
            for layer in range(LAYERS):
                rows = _rows(experts, tokens, seed=step * LAYERS + layer)
                out, device.launched_ns = torch.empty_like(rows.x), None
                began = time.thread_time_ns()
                task = submit(engine, layer, rows, "decode", [lambda _, rows=rows: (rows.topk_ids, rows.topk_weights)])
                launched = (device.launched_ns or time.thread_time_ns()) - routed[-1]
                join(engine, task, out)
                taken.append((launched / 1e3, (time.thread_time_ns() - began) / 1e3))
        launches, whole = zip(*taken[len(taken) // 4 :], strict=True)  # the first quarter warms up
        return median(launches), median(whole)
    finally:
        device.close()


def skewed_loads(experts: int, tokens: int, seed: int = 0) -> Mapping[int, int]:
    """Token loads of the active experts, top-`TOPK` of a skewed distribution."""
    return active_loads(torch.bincount(_rows(experts, tokens, seed).topk_ids.reshape(-1), minlength=experts))


def _rows(experts: int, tokens: int, seed: int) -> Rows:
    """Each token's choices, without repeats, from a skewed distribution."""
    made = torch.Generator().manual_seed(seed)
    weights = torch.rand(experts, generator=torch.Generator().manual_seed(1)) ** 3 + 0.01
    ids = torch.multinomial(weights.expand(tokens, -1), TOPK, generator=made)
    return Rows(tokens, TOPK, torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), ids, torch.full((tokens, TOPK), 1 / TOPK))


def _policy(name: str, experts: int, pool: int):
    machine = hardware.load("pinned-link")
    cpu, link, gpu = machine.cpu, machine.link, machine.gpu
    policy = registry.get(name, PolicyOptions())
    policy.start(ModelShape(LAYERS, experts, TOPK), pool, CostPrior(cpu.c0, cpu.a, cpu.b, link.s0, link.t1, gpu.g0, gpu.g1, gpu.g2, False), None)
    return policy


def _median_us(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        began = time.thread_time_ns()
        call()
        taken.append((time.thread_time_ns() - began) / 1e3)
    return median(taken)
