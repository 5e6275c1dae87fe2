"""CudaDevice's own code on the fake runtime, with threads and delays: the unpatched model's tokens, whatever happens."""

import itertools
import json
import logging
import random
import threading
from ctypes import CFUNCTYPE, c_int32, c_void_p
from dataclasses import replace

import pytest
import torch

import apexk
from apexk.demo import model as demo
from apexk.device.base import At, CopyFailed
from apexk.device.checked import CheckedDevice
from apexk.device.native.channel import Channel
from apexk.device.native.hand_off import HandOffError
from apexk.device.runtime import CudaError
from apexk.policy import decision_from_dict, get, names
from apexk.testing.tiny import tiny
from apexk.timeline import read

NEW_TOKENS = 5
SLOW = dict(delay_us=150, link_gb_s=0.5)  # an expert takes 0.2 ms
SPLITS = "apexk.testing.splits:SplitAll"
POLICIES = ("no_assign", "sa_only", "ea_only", "apex", SPLITS)


@pytest.fixture(scope="module")
def plain(trained):
    """(texts, tokens of the unpatched model) by batch size, ragged."""
    model, tokenizer = trained()
    return {n: (texts := demo.prompts(n, seed=20 + n), demo.generate(model, tokenizer, texts, NEW_TOKENS)) for n in (1, 3, 8)}


@pytest.fixture
def run(trained, plain, fake_gpu):
    """`run(batches, runtime options, use=..., **config)` generates on the fake GPU, compares with the unpatched model and gives
    `use(handle, runtime)`, called before the model is restored."""
    model, tokenizer = trained()

    def run(batches=(3,), options=SLOW, use=lambda handle, runtime: handle.summary(), before=lambda handle, runtime: None, **config):
        with fake_gpu(**options) as made:
            with apexk.swap(model, apexk.ApexConfig(device="cuda", **config)) as handle:
                before(handle, made[0])
                for batch in batches:
                    texts, wanted = plain[batch]
                    assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)
                return use(handle, made[0])

    return run


@pytest.mark.parametrize("pool", [0, 1, 4, 16, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_float32_tokens_are_the_unpatched_models(run, policy, pool):
    run((1, 3, 8), SLOW | {"seed": pool}, policy=policy, pool=pool)


@pytest.mark.parametrize("policy", sorted(set(names()) - set(POLICIES)))
def test_every_other_policy(run, policy):
    run((3,), policy=policy, pool=5)


@pytest.mark.parametrize("options", [
    dict(memory_operations=False), dict(memory_operations=False, one_callback_thread=True), dict(delay_us=0), dict(link_gb_s=0.05, delay_us=400),
], ids=["host functions", "one callback thread", "fast", "slow link"])  # fmt: skip
@pytest.mark.parametrize("resident_first", [True, False])
def test_other_machines(run, options, resident_first):
    run((1, 3), SLOW | options, policy="apex", pool=6, resident_first=resident_first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_far_from_float32_as_the_plain_model(trained, fake_gpu, dtype):
    (full, tokenizer), (short, _) = trained(), trained(dtype)
    batch = tokenizer(demo.prompts(4, seed=3), return_tensors="pt", padding=True)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        exact, rounded = full(**batch).logits, short(**batch).logits.float()
        with fake_gpu(**SLOW), apexk.swap(short, apexk.ApexConfig(device="cuda", pool=8)):
            swapped = short(**batch).logits.float()
    error, own = (swapped - exact)[real], (rounded - exact)[real]
    assert error.pow(2).mean().sqrt() <= 1.1 * own.pow(2).mean().sqrt()


@pytest.mark.parametrize("policy", ["apex", "ea_only", "llamacpp_static32", SPLITS])
def test_long_inputs_run_in_parts(run, policy):
    def shorten(handle, runtime):
        handle.engine.settings = replace(handle.engine.settings, part_tokens=16)

    run((8,), before=shorten, policy=policy, pool=6)


def test_replay_and_order_of_a_timeline(run, tmp_path):
    """Decisions fed back give the same plans; on each lane one operation at a time; each pair is computed once."""
    path = tmp_path / "t.jsonl"
    run((3,), policy="apex", pool=6, timeline=path)
    rows = read(path).rows
    plans = [row for row in rows if row["kind"] == "plan"]
    assert len(plans) == NEW_TOKENS * 4
    pairs = {}
    for row in plans:
        name, view, plan = decision_from_dict(json.loads(json.dumps(row["decision"])))
        assert get(name).on_route(view) == plan
        pairs[row["step"], row["layer"]] = dict(view.loads)
    for row in rows:
        assert row["modelled"] is False and row["end_ns"] >= row["start_ns"] >= 0
        if row["kind"] in ("host.ffn", "gpu.resident", "gpu.arrived"):
            for expert in row["experts"]:
                del pairs[row["step"], row["layer"]][expert]
    assert not any(pairs.values())
    for lane in ("gpu", "side", "h2d"):
        spans = sorted((r["start_ns"], r["end_ns"]) for r in rows if r["lane"] == lane)
        assert spans and all(a[1] <= b[0] + 1000 for a, b in itertools.pairwise(spans)), lane


def test_checked_device_finds_nothing(run):
    def wrap(handle, runtime):
        handle.engine.device = handle.engine.observer._device = CheckedDevice(handle.engine.device)
        handle.engine.restart()

    for policy in ("apex", SPLITS, "hybrimoe", "ea_only", "sa_only", "mixtral_offloading", "post_fetch", "llamacpp_static32"):
        run((3,), before=wrap, policy=policy, pool=5)


@pytest.mark.parametrize(("policy", "part_tokens"), [("ea_only", 2048), (SPLITS, 2048), (SPLITS, 6)])
def test_a_failed_copy_runs_on_the_cpu_in_the_same_layer(run, monkeypatch, caplog, policy, part_tokens):
    copy, calls, failed = Channel.copy, itertools.count(), []

    def failing(self, copies, done, start=None):
        if start is not None and next(calls) % 3 == 1:  # not the first residents'
            failed.append(copies[len(copies) // 2].expert)  # those before and behind it go on
            self.runtime.fail("memcpy", after=len(copies) // 2)
        return copy(self, copies, done, start)

    monkeypatch.setattr(Channel, "copy", failing)
    with caplog.at_level(logging.WARNING, "apexk"):
        found = run(policy=policy, part_tokens=part_tokens, pool=6, before=lambda handle, runtime: setattr(Channel, "runtime", runtime))
    assert failed and sum(found[phase]["failed_copies"] for phase in found) == len(failed)
    assert sum("its copy failed" in record.getMessage() for record in caplog.records) == len(failed)


def test_events_of_failed_copies_are_used_again_once_they_are_done(trained, fake_gpu):
    """A start that is still to come would be given another operation's time; and the link's rate is that of what was copied."""
    model, _ = trained()
    with fake_gpu(), apexk.swap(model, apexk.ApexConfig(device="cuda", pool=6)) as handle:
        device, gate = handle.engine.device, threading.Event()
        copies, at = device.copies, At(0, 0, "decode")
        device.runtime.launch(copies._stream, gate.wait)
        device.runtime.fail("memcpy", code=700)
        (failed,) = device.copy_experts(at, {20: 0})
        assert isinstance(failed, CopyFailed) and len(copies._limbo) == 2
        device.stop_speculation(at, 4)
        started = copies._limbo
        assert len(started) == 1 and started[0] not in device.clock._free
        gate.set()
        device.runtime.synchronize_stream(copies._stream)
        device.stop_speculation(at, 4)
        assert not copies._limbo and device.clock._free[-1] is started[0]
        device.runtime.fail("memcpy", after=1, code=700)
        one, failed, other = device.copy_experts(at, {20: 0, 21: 1, 22: 2})
        assert isinstance(failed, CopyFailed) and one is other and one.experts == 2


def test_a_failed_prefetch_costs_its_victim_and_no_token(run, monkeypatch, caplog):
    speculate, calls, broken = Channel.speculate, itertools.count(), []

    def failing(self, queue):
        if queue and next(calls) % 3 == 0:  # its thread asks for an event that is gone
            queue = [queue[0]._replace(after=dead_event(self.runtime)), *queue[1:]]
            broken.append(queue[0])
        speculate(self, queue)

    monkeypatch.setattr(Channel, "speculate", failing)
    with caplog.at_level(logging.WARNING, "apexk"):  # eager: no prediction comes too late to be acted on
        run(policy="sa_only", pool=6, options=dict(eager=True), before=lambda handle, runtime: setattr(Channel, "runtime", runtime))
    assert broken and any("the prefetch of expert" in record.getMessage() for record in caplog.records)


def dead_event(runtime):
    event = runtime.new_event()
    assert CFUNCTYPE(c_int32, c_void_p)(runtime.table().event_destroy)(event.handle) == 0
    return event


@pytest.mark.parametrize("call", ["memcpy", "event_record", "wait_event", "launch"])
def test_a_failed_call_is_an_error_and_the_next_pass_is_right(trained, plain, fake_gpu, call):
    model, tokenizer = trained()
    texts, wanted = plain[3]
    with fake_gpu(**SLOW) as made, apexk.swap(model, apexk.ApexConfig(device="cuda", policy="no_assign", pool=6)):
        made[0].fail(call, after=5, code=700)
        with pytest.raises(CudaError, match="CUDA error 700"):
            demo.generate(model, tokenizer, texts, NEW_TOKENS)
        assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)
    assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)


def test_a_worker_error_reaches_the_caller(trained, plain, fake_gpu):
    model, tokenizer = trained()
    texts, wanted = plain[3]
    with fake_gpu(**SLOW), apexk.swap(model, apexk.ApexConfig(device="cuda", policy="no_assign", pool=0)) as handle:
        blocks = handle.engine.device._host_blocks
        good, blocks[2] = blocks[2], torch.zeros_like(blocks[2])
        with pytest.raises((HandOffError, ValueError), match="block|host|CPU job"):
            demo.generate(model, tokenizer, texts, NEW_TOKENS)
        blocks[2] = good
        assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)


def test_a_store_that_cannot_be_pinned_still_works(trained, plain, fake_gpu, caplog):
    model, tokenizer = trained()
    texts, wanted = plain[3]
    from apexk.hf import gpu

    with fake_gpu(**SLOW) as made:
        opened = gpu.open_runtime

        def failing():
            runtime = opened()
            runtime.fail("register", after=1, code=2)
            return runtime

        gpu.open_runtime = failing
        with caplog.at_level(logging.WARNING, "apexk"), apexk.swap(model, apexk.ApexConfig(device="cuda", pool=6)) as handle:
            info = handle.info()
            assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)
            assert made[0].count("pageable_copies") > 0
    assert info["pinned_bytes"] == 0 and "ulimit -l" in info["pin_failure"]
    assert any("not pinned" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("policy", ["ea_only", "apex", "freetoken_q"])  # the last one's slots are for any layer
def test_exact_copies_by_a_kernel(run, policy):
    launches = []

    def before(handle, runtime):
        kernels = handle.engine.device.kernels
        gather = kernels.gather
        kernels.gather = lambda blocks, experts, *rest: (launches.append(len(experts)), gather(blocks, experts, *rest))

    info = run((1, 3), policy=policy, pool=6, transfer="sm_gather", before=before, use=lambda handle, runtime: (handle.info(), handle.summary()))
    assert info[0]["transfer"] == "sm_gather"
    assert max(launches) > 1 and sum(launches) == sum(phase["exact"] for phase in info[1].values()), "a launch for each call, not for each expert"


def test_a_kernel_needs_a_pinned_store(run, monkeypatch, caplog):
    from apexk.store.host_store import HostStore

    pin = HostStore.pin
    monkeypatch.setattr(HostStore, "pin", lambda self, registry: (registry.fail("register", code=2), pin(self, registry))[1])
    with caplog.at_level(logging.WARNING, "apexk"):
        info = run(policy="ea_only", pool=6, transfer="sm_gather", use=lambda handle, runtime: handle.info())
    assert info["transfer"].startswith("copy_engine, since") and any("transfer by copy_engine" in r.getMessage() for r in caplog.records)
    with pytest.raises(ValueError, match="device 'cpu' has no GPU that could"):
        apexk.ApexConfig(device="cpu", transfer="sm_gather")


def test_a_pinned_store_and_the_choices_are_in_the_result(run):
    def use(handle, runtime):
        assert runtime.count("pageable_copies") == 0
        return handle.info()

    info = run(use=use, policy="ea_only", pool=6)
    assert info["pinned_bytes"] == info["host_bytes"] and info["pin_failure"] is None
    assert info["hand_off"] == "flags" and info["transfer"] == "copy_engine" and "6 slots a layer" in info["pool_arithmetic"]
    assert run(options=SLOW | {"memory_operations": False}, use=use, pool=2)["hand_off"] == "host functions"


@pytest.mark.parametrize(("memory", "pool", "context", "slots"), [
    (64 << 20, "2MiB", 64, 5), (64 << 20, "0.04", 64, 6), (1 << 30, None, 64, 32), (64 << 20, "auto", 1 << 20, 0),
])  # fmt: skip
def test_pool_sizes(run, memory, pool, context, slots):
    """Blocks are 96 KiB: 384 KiB for one slot in each of four layers."""
    assert run(options={"memory_bytes": memory}, use=lambda handle, runtime: handle.capacity.slots, pool=pool, context_tokens=context) == slots


def test_no_room_for_the_pool_is_refused_with_the_numbers(trained, fake_gpu, plain, native_threads):
    model, tokenizer = trained()
    texts, wanted = plain[1]
    ended = native_threads()
    with fake_gpu(memory_bytes=8 << 20):
        with pytest.raises(ValueError, match=r"32 slots a layer x 4 layers x 0.09 MiB = 0.01 GiB, but 0.01 GiB .* enough for 21"):
            apexk.swap(model, apexk.ApexConfig(device="cuda", pool=32))
    with fake_gpu() as made:
        from apexk.hf import gpu

        opened = gpu.open_runtime

        def failing():
            runtime = opened()
            runtime.fail("malloc", code=2)
            return runtime

        gpu.open_runtime = failing
        with pytest.raises(MemoryError, match="a pool of 4 layers x 32 slots x 98304 bytes = 0.01 GiB does not fit: .* are free; ask for fewer"):
            apexk.swap(model, apexk.ApexConfig(device="cuda", pool=32))
        assert made
    assert ended()
    assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)


@pytest.mark.parametrize("policy", ["apex", SPLITS])
def test_steady_state_allocates_nothing(trained, fake_gpu, policy):
    model, tokenizer = trained()
    texts = demo.prompts(4, seed=9)
    with fake_gpu(**SLOW) as made, apexk.swap(model, apexk.ApexConfig(device="cuda", policy=policy, pool=6)):
        counts = []
        while len(counts) < 2 or (len(counts) < 40 and counts[-1] != counts[-2]):  # events are kept, as many as were ever under way at once: that is chance
            demo.generate(model, tokenizer, texts, 12)
            counts.append(made[0].allocations())
        assert counts[-1] == counts[-2], counts


def test_bad_rows_are_refused_before_anything_is_launched(run):
    from apexk.device.base import At, Rows

    def use(handle, runtime):
        device, launched = handle.engine.device, []
        runtime.launch = lambda stream, fn: launched.append(fn)
        hidden = handle._store.block.hidden
        good = dict(tokens=2, topk=2, x=torch.zeros(2, hidden), topk_ids=torch.zeros(2, 2, dtype=torch.int64), topk_weights=torch.zeros(2, 2))
        for name, wrong in (("x", torch.zeros(2, hidden, dtype=torch.bfloat16)), ("topk_ids", torch.zeros(2, 2, dtype=torch.int32)),
                            ("topk_weights", torch.zeros(2, 2).t()[:1])):
            with pytest.raises(ValueError, match=f"{name}: got .* wanted a contiguous"):
                device.read_back(At(0, 0, "decode"), Rows(**good | {name: wrong}))
        del runtime.launch
        return launched

    assert run(use=use, pool=2) == []


def test_swapped_again_and_again_leaves_nothing(trained, plain, fake_gpu, native_threads):
    model, tokenizer = trained()
    texts, wanted = plain[1]

    def swaps(pools):
        for pool in pools:
            with apexk.swap(model, apexk.ApexConfig(device="cuda", pool=pool)):
                assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)
        return len(open("/proc/self/maps").readlines())

    with fake_gpu(delay_us=50) as made:
        maps, ended = [swaps([3])], native_threads()
        while len(maps) < 2 or (len(maps) < 5 and maps[-1] >= maps[-2] + 8):  # eight that kept one each would show every time
            maps.append(swaps(range(8)))
        assert ended() and len(made) == 1 + 8 * (len(maps) - 1)
        assert maps[-1] < maps[-2] + 8, maps


def test_ranges_wrap_it(run):
    from test_ranged import Recorder

    from apexk.device.ranged import RangedDevice

    recorder = Recorder()

    def wrap(handle, runtime):
        handle.engine.device = RangedDevice(handle.engine.device, recorder)

    run(before=wrap, policy="ea_only", pool=6)
    kinds = {kind for kind, *_ in recorder.seen}
    assert {"route", "copy.exact", "gpu.resident", "combine"} <= kinds


@pytest.mark.parametrize("seed", range(8))
def test_an_interrupt_anywhere_leaves_a_model_that_works(trained, plain, fake_gpu, seed):
    model, tokenizer = trained()
    texts, wanted = plain[3]
    left = random.Random(seed).randint(20, 400)

    def counted(function):
        def call(*arguments):
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return function(*arguments)

        return call

    with fake_gpu(**SLOW) as made, apexk.swap(model, apexk.ApexConfig(device="cuda", policy="apex", pool=6)):
        for name in ("record", "wait", "launch", "copy_async", "query"):
            setattr(made[0], name, counted(getattr(made[0], name)))
        with pytest.raises(KeyboardInterrupt):
            while True:
                demo.generate(model, tokenizer, texts, NEW_TOKENS)
        assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)
    assert torch.equal(demo.generate(model, tokenizer, texts, NEW_TOKENS), wanted)


def test_an_input_of_hundreds_of_parts(fake_gpu):  # of one token are asked for: more than the CPU's queue holds jobs of
    model, ids = tiny("qwen3_moe"), torch.randint(0, 60, (1, 300))
    wanted = torch.no_grad()(model)(input_ids=ids).logits
    with torch.no_grad(), fake_gpu(), apexk.swap(model, apexk.ApexConfig(device="cuda", pool=1, part_tokens=1)):
        found = model(input_ids=ids).logits
    assert torch.equal(found.argmax(-1), wanted.argmax(-1)) and (found - wanted).abs().max() < 1e-4
