"""What goes wrong around a run: failed copies, interrupts at random moments, several models, several threads, many swaps."""

import gc
import random
import signal
import threading
import time

import pytest
import torch
from hf_models import assert_as_before, snapshot, tiny

import apexk
from apexk.demo import model as demo
from apexk.device.base import CopyFailed
from apexk.testing.tiny import tiny as family


@pytest.mark.parametrize("policy", ["apex", "ea_only", "mixtral_offloading", "hybrimoe"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_failed_copies_change_no_token(trained, policy, share, caplog):
    """The CPU computes what could not be copied, in the same layer; the log and the sums say so."""
    model, tokenizer = trained()
    texts = demo.prompts(3, seed=2)
    wanted = demo.generate(model, tokenizer, texts, 8)
    with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=5)) as handle:
        real, draw = handle._device.copy_experts, random.Random(1)

        def failing(at, places, after=()):
            lost = {expert: slot for expert, slot in places.items() if draw.random() < share}
            for slot in lost.values():
                handle._device.halves.poison(slot)
            issued = iter(real(at, {expert: slot for expert, slot in places.items() if expert not in lost}, after))
            return [CopyFailed("injected") if expert in lost else next(issued) for expert in places]

        handle._device.copy_experts = failing
        assert torch.equal(demo.generate(model, tokenizer, texts, 8), wanted)
        sums = handle.summary()
    failed = sum(phase["failed_copies"] for phase in sums.values())
    assert failed > 0 and sum("its copy failed: injected" in r.message for r in caplog.records) == failed
    assert share < 1 or sum(phase["exact"] for phase in sums.values()) == 0


def test_a_hundred_interrupts_at_random_moments(native_threads):
    """Ctrl-C anywhere in a pass: the next pass is right, and the model restores with nothing left behind."""
    model = tiny(num_experts=8)
    before, keys, ended = snapshot(model), list(model.state_dict()), native_threads()
    ids = torch.randint(0, 64, (2, 9))
    draw, hits, passes = random.Random(4), 0, 0

    def press(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        wanted = model(input_ids=ids).logits.argmax(-1)
        handle = apexk.swap(model, apexk.ApexConfig(pool=3))
        model(input_ids=ids)
        usual, old = 0.01, signal.signal(signal.SIGALRM, press)
        try:
            while hits < 100:  # a pass that ended before its interrupt does not count, and says how long a pass is by now
                passes += 1
                assert passes < 2000, f"{hits} interrupts in {passes} passes"
                began = time.perf_counter()
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, usual))
                    try:
                        model(input_ids=ids)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    usual = time.perf_counter() - began
                except KeyboardInterrupt:
                    hits += 1
                assert torch.equal(model(input_ids=ids).logits.argmax(-1), wanted)
        finally:
            signal.signal(signal.SIGALRM, old)
    handle.restore()
    assert_as_before(model, before, keys)
    assert ended()


def test_two_models_in_one_process():
    first, second = tiny(num_experts=8), tiny(num_experts=6, hidden_size=64)
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        wanted = [m(input_ids=ids).logits for m in (first, second)]
        with apexk.swap(first, apexk.ApexConfig(pool=3)), apexk.swap(second, apexk.ApexConfig(policy="ea_only", pool=1)):
            for _ in range(3):
                for model, logits in zip((first, second), wanted, strict=True):
                    assert torch.allclose(model(input_ids=ids).logits, logits, rtol=0, atol=1e-5)


def test_two_threads_on_one_model_take_turns():
    model = tiny(num_experts=8)
    inputs = [torch.randint(0, 64, (1, n)) for n in (5, 12)]
    with torch.no_grad():
        wanted = [model(input_ids=ids).logits for ids in inputs]
    found = [[], []]

    def run(number):
        with torch.no_grad():
            for _ in range(20):
                found[number].append(model(input_ids=inputs[number]).logits)

    with apexk.swap(model, apexk.ApexConfig(pool=3)):
        threads = [threading.Thread(target=run, args=(n,)) for n in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for logits, expected in zip(found, wanted, strict=True):
        assert len(logits) == 20 and all(torch.allclose(x, expected, rtol=0, atol=1e-5) for x in logits)


def mappings():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def test_fifty_swaps_leave_nothing_behind(native_threads):
    model = tiny(num_experts=8, num_hidden_layers=3)
    before, keys, ended = snapshot(model), list(model.state_dict()), native_threads()
    ids = torch.randint(0, 64, (1, 7))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for number in range(50):
            if number == 10:
                gc.collect()
                mapped = mappings()
            with apexk.swap(model, apexk.ApexConfig(pool=number % 9, policy=("apex", "ea_only", "no_assign")[number % 3])):
                assert torch.allclose(model(input_ids=ids).logits, wanted, rtol=0, atol=1e-5)
    assert_as_before(model, before, keys)
    gc.collect()
    assert ended() and mappings() < mapped + 20, "forty swaps that kept one each would hold forty more"


def test_an_idle_swapped_model_uses_no_processor(assert_idle):
    model = tiny(num_experts=8)
    with apexk.swap(model, apexk.ApexConfig(pool=3)), torch.no_grad():
        model(input_ids=torch.randint(0, 64, (1, 7)))
        assert_idle()


@pytest.mark.parametrize("device", ["virtual", "cpu"])
def test_a_restore_by_another_thread_waits_for_the_layer(device):
    """The pass goes on with the model's own layers, and nothing that runs loses its memory."""
    model = tiny(num_experts=8, num_hidden_layers=4)
    before, keys = snapshot(model), list(model.state_dict())
    ids = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
    draw, errors = random.Random(7), []

    def passes(stop):
        try:
            with torch.no_grad():
                while not stop.is_set():
                    assert torch.allclose(model(input_ids=ids).logits, wanted, rtol=0, atol=1e-5)
        except BaseException as error:  # told below: a thread's own end is quiet
            errors.append(error)

    for _ in range(12):
        handle, stop = apexk.swap(model, apexk.ApexConfig(pool=3 if device == "virtual" else 0, device=device)), threading.Event()
        thread = threading.Thread(target=passes, args=(stop,))
        thread.start()
        time.sleep(draw.uniform(0, 0.03))
        handle.restore()
        stop.set()
        thread.join()
    assert not errors
    assert_as_before(model, before, keys)


@pytest.mark.parametrize("model_type", ["gpt_oss", "dbrx"])
def test_filling_a_parameter_that_is_not_a_view_destroys_nothing(model_type):
    model = family(model_type)
    before, keys, hidden = snapshot(model), list(model.state_dict()), 0
    with apexk.swap(model, apexk.ApexConfig(pool=2)), torch.no_grad():
        for parameter in model.parameters():
            if type(parameter).__name__ == "StoredParameter":
                hidden += 1
                parameter.zero_()
    assert hidden
    assert_as_before(model, before, keys)
