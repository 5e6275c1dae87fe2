"""`HandOff` from Python, with the real CPU kernels on the fake runtime: values, errors, endings."""

import gc
import threading
import time

import pytest
import torch

from apexk.device.native.hand_off import HandOff, HandOffError
from apexk.device.runtime import CudaError
from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.reference import grouped_ffn_ref

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS, TOPK = 48, 32, 5, 3, 2
WAYS = [{}, {"memory_operations": False}, {"memory_operations": False, "one_callback_thread": True}]
IDS = ["flags", "host functions", "one callback thread"]


class Bench:
    def __init__(self, runtime, depth: int = 4):
        self.runtime, self.ffn = runtime, HostFFN(threads=2, oversubscribe=True)
        self.hand_off = HandOff(runtime, self.ffn, max_experts=EXPERTS, depth=depth)
        self.down, self.back = runtime.new_stream("down"), runtime.new_stream("back")
        self.weights = torch.randn(EXPERTS, 3 * HIDDEN * INTERMEDIATE) / 8
        self.blocks = torch.tensor([row.data_ptr() for row in self.weights])
        self.rows = runtime.empty_device((TOKENS, HIDDEN), torch.float32)
        self.x = runtime.empty_pinned((TOKENS, HIDDEN), torch.float32)
        self.ids = runtime.empty_pinned((TOKENS, TOPK), torch.int64)
        self.ids.copy_(torch.tensor([[0, 1], [4, 2], [3, 0]]))
        self.pair_weights = runtime.empty_pinned((TOKENS, TOPK), torch.float32).uniform_()
        self.out = runtime.empty_pinned((TOKENS * TOPK, HIDDEN), torch.float32)
        self.result = runtime.empty_device((TOKENS * TOPK, HIDDEN), torch.float32)

    def submit(self, experts=(0, 2, 4), **changed) -> int:
        given = {"blocks": self.blocks, "topk_ids": self.ids, **changed}
        return self.hand_off.submit(self.down, self.x, given["blocks"], given["topk_ids"], self.pair_weights, list(experts), self.out,
                                    intermediate=INTERMEDIATE)

    def expected(self, experts) -> torch.Tensor:
        want = torch.full(self.out.shape, torch.nan, dtype=torch.float64)
        grouped_ffn_ref(self.rows, self.blocks, self.ids, self.pair_weights, list(experts), want, intermediate=INTERMEDIATE)
        return want

    def close(self):
        self.hand_off.close()
        self.ffn.close()


@pytest.fixture
def make_bench(make_runtime):
    made = []

    def make(way: dict | None = None, depth: int = 4, **settings) -> Bench:
        made.append(Bench(make_runtime(**settings, **(way or {})), depth))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_layers(make_bench, way):
    """Rows down, CPU experts, rows back, over and over on the same buffers: each result is that of its own rows."""
    bench = make_bench(way, seed=3, link_gb_s=0.05, delay_us=150)
    for step in range(12):
        experts = [e for e in range(EXPERTS) if (step >> e) & 1 or e == step % EXPERTS]
        bench.rows.copy_(torch.randn(TOKENS, HIDDEN))
        bench.out.fill_(torch.nan)
        bench.runtime.copy_async(bench.x.data_ptr(), bench.rows.data_ptr(), bench.x.nbytes, False, bench.down)
        ticket = bench.submit(experts)
        bench.hand_off.join(ticket, bench.back)
        bench.runtime.copy_async(bench.result.data_ptr(), bench.out.data_ptr(), bench.out.nbytes, True, bench.back)
        bench.runtime.synchronize_stream(bench.back)
        torch.testing.assert_close(bench.result.double(), bench.expected(experts), rtol=1e-4, atol=1e-5, equal_nan=True)
        start, end = bench.hand_off.finished(ticket)
        assert start < end <= time.perf_counter_ns()


@pytest.mark.parametrize("way", WAYS, ids=IDS)
def test_nothing_begins_before_the_rows_are_there(make_bench, way):
    bench = make_bench(way)
    gate, after = threading.Event(), threading.Event()
    bench.out.fill_(torch.nan)
    bench.runtime.launch(bench.down, gate.wait)
    ticket = bench.submit()
    bench.hand_off.join(ticket, bench.back)
    bench.runtime.launch(bench.back, after.set)
    time.sleep(0.01)
    assert bench.hand_off.finished(ticket) is None and bench.out.isnan().all() and not after.is_set()
    gate.set()
    bench.hand_off.wait(ticket)
    bench.runtime.synchronize_stream(bench.back)
    assert after.is_set() and not bench.out.isnan().all()


@pytest.mark.parametrize("way", WAYS[:2], ids=IDS[:2])
def test_a_worker_error_reaches_python_and_hangs_no_stream(make_bench, way):
    bench = make_bench(way)
    bench.out.fill_(torch.nan)
    gate = threading.Event()
    bench.runtime.launch(bench.down, gate.wait)
    bad = bench.submit(topk_ids=torch.full((TOKENS, TOPK), 77))
    bench.hand_off.join(bad, bench.back)
    gate.set()
    bench.runtime.synchronize_stream(bench.back)
    with pytest.raises(HandOffError, match=f"job {bad}: an expert id is outside"):
        bench.submit()
    assert bench.out.isnan().all()
    bench.hand_off.wait(bench.submit())
    bench.hand_off.check()
    no_block = bench.submit(blocks=torch.zeros(EXPERTS, dtype=torch.int64))
    with pytest.raises(HandOffError, match="no block"):
        bench.hand_off.wait(no_block)
    bench.hand_off.check()  # it was told


def test_refusals(make_bench, make_runtime):
    bench = make_bench({"memory_operations": False}, depth=2)
    with pytest.raises(ValueError, match="'flags'.*no stream memory operations.*'host functions'"):
        HandOff(bench.runtime, bench.ffn, max_experts=3, how="flags")
    with pytest.raises(ValueError, match="'callbacks'; there are: 'flags', 'host functions'"):
        HandOff(bench.runtime, bench.ffn, max_experts=3, how="callbacks")
    with pytest.raises(ValueError, match="6 experts for one job.*at most 5"):
        bench.submit(range(6))
    with pytest.raises(ValueError, match="topk_ids must have shape"):
        bench.submit(topk_ids=torch.zeros(1, TOPK, dtype=torch.int64))
    gate = threading.Event()
    bench.runtime.launch(bench.down, gate.wait)
    tickets = [bench.submit(), bench.submit()]
    with pytest.raises(RuntimeError, match="2 CPU jobs are outstanding.*larger depth"):
        bench.submit()
    gate.set()
    for ticket in tickets:
        bench.hand_off.wait(ticket)
    with pytest.raises(ValueError, match="unknown tag or ticket"):
        bench.hand_off.join(99, bench.back)
    bench.runtime.fail("host_func", code=719)
    with pytest.raises(CudaError, match="handing rows to the CPU failed with CUDA error 719"):
        bench.submit()
    bench.hand_off.wait(bench.submit())
    bench.hand_off.close()
    with pytest.raises(ValueError, match="closed"):
        bench.submit()
    with pytest.raises(ValueError, match="closed"):
        bench.hand_off.check()


def test_dropped_without_close(make_runtime):
    runtime = make_runtime()
    before = runtime.count("allocations")
    with HostFFN(threads=1) as ffn:
        hand_off = HandOff(runtime, ffn, max_experts=1)
        assert runtime.count("allocations") > before
        del hand_off
        gc.collect()
        assert runtime.count("allocations") == before


def test_idle_takes_no_cpu(make_bench, assert_idle):
    bench = make_bench()
    bench.hand_off.wait(bench.submit())
    assert_idle()


def test_steady_state_allocates_nothing(make_bench):
    bench = make_bench()
    made = bench.runtime.allocations()
    for _ in range(20):
        ticket = bench.submit()
        bench.hand_off.join(ticket, bench.back)
        bench.hand_off.wait(ticket)
    assert bench.runtime.allocations() == made
    assert len(bench.hand_off._buffers) <= bench.hand_off.depth, "buffers of old jobs are let go"
