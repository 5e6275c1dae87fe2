"""Swapping in and out: the model comes back bit for bit, and while it is swapped it is used as any other."""

import subprocess
import sys
import threading

import pytest
import torch
from hf_models import assert_as_before, tiny

import apexk
from apexk.demo import model as demo


def test_restore_is_bit_exact_and_stops_every_thread(fresh, native_threads):
    model, tokenizer, before, keys = fresh
    texts = demo.prompts(2)
    demo.generate(model, tokenizer, texts, 2)  # torch's own threads start here
    ended = native_threads()
    handle = apexk.swap(model, apexk.ApexConfig(pool=4))
    demo.generate(model, tokenizer, texts, 4)
    handle.restore()
    handle.restore()
    assert_as_before(model, before, keys)
    assert ended()
    assert handle.info()["restored"]


def test_state_dict_while_swapped(fresh):
    model, _, before, keys = fresh
    with apexk.swap(model, apexk.ApexConfig(pool=4)):
        state = model.state_dict()
        assert list(state) == keys
        assert all(torch.equal(state[name], before[name][0]) for name in before)


def test_save_pretrained_while_swapped(fresh, tmp_path):
    model, _, before, keys = fresh
    with apexk.swap(model, apexk.ApexConfig(pool=4)):
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    state = again.state_dict()
    assert all(torch.equal(state[name], before[name][0]) for name in before)


def test_parameters_are_views_of_one_store(fresh):
    model, *_ = fresh
    handle = apexk.swap(model, apexk.ApexConfig(pool=4))
    store = handle._store
    for layer, block in enumerate(m for m in model.modules() if type(m).__name__ == "Qwen3MoeSparseMoeBlock"):
        for parameter in (block.experts.gate_up_proj, block.experts.down_proj):
            assert 0 <= parameter.data_ptr() - store.blocks(layer).data_ptr() < store.nbytes // store.layers
    handle.restore()


def test_output_router_logits_are_unchanged(fresh):
    model, tokenizer, *_ = fresh
    batch = tokenizer(demo.prompts(3), return_tensors="pt", padding=True)
    with torch.no_grad():
        plain = model(**batch, output_router_logits=True).router_logits
        with apexk.swap(model, apexk.ApexConfig(pool=8)):
            swapped = model(**batch, output_router_logits=True).router_logits
    assert len(plain) == len(swapped) == 4
    for a, b in zip(plain, swapped, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_swap_again_with_another_pool(fresh):
    model, tokenizer, before, keys = fresh
    texts = demo.prompts(2)
    wanted = demo.generate(model, tokenizer, texts, 6)
    for pool in (0, 32, 3):
        with apexk.swap(model, apexk.ApexConfig(pool=pool)):
            assert torch.equal(demo.generate(model, tokenizer, texts, 6), wanted)
    assert_as_before(model, before, keys)


def test_info_names_every_setting_with_its_source():
    model = tiny()
    with apexk.swap(model, apexk.ApexConfig(pool=3, rate_ema=0.5)) as handle:
        info = handle.info()
    settings = info["config"]["settings"]
    assert settings["rate_ema"] == {"value": 0.5, "source": "user"}
    assert settings["utility_decay"] == {"value": 0.5, "source": "hardware file a6000-paper"}
    assert settings["forgetting"] == {"value": 0.995, "source": "default"}
    assert info["config"]["pool"] == 3 and info["hardware"] == "a6000-paper" and info["modelled"] is True
    assert info["model"]["bytes_per_expert"] == 3 * 32 * 16 * 4


@pytest.mark.parametrize("device", ["virtual", "cpu"])
def test_weights_written_to_while_swapped_are_used_everywhere(device):
    """`load_state_dict` writes into the store; slots that hold the old weights are filled again."""
    model, other, ids = tiny(), tiny(), torch.arange(12)[None]
    torch.manual_seed(5)
    changed = {name: value + 0.05 * torch.randn_like(value) for name, value in other.state_dict().items()}
    other.load_state_dict(changed)
    with torch.no_grad():
        wanted = other(ids).logits
        with apexk.swap(model, apexk.ApexConfig(device=device, pool=None if device == "cpu" else 3)):
            model(ids)
            model.load_state_dict(changed)
            torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-5)
            for layer in other.model.layers:
                layer.mlp.experts.down_proj.mul_(2)
            for layer in model.model.layers:
                layer.mlp.experts.down_proj.mul_(2)
            torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(ids).logits, other(ids).logits)


def test_a_deep_copy_or_a_pickle_is_the_unpatched_model():
    import copy
    import pickle

    model, ids = tiny(), torch.arange(6)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        with apexk.swap(model, apexk.ApexConfig(pool=2)) as handle:
            steps = handle.summary()["prefill"]["steps"]
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(twin(ids).logits, wanted)
                assert handle.summary()["prefill"]["steps"] == steps, "the copy does not run on the original's engine"
                with apexk.swap(twin, apexk.ApexConfig(pool=1)):
                    torch.testing.assert_close(twin(ids).logits, wanted)
        assert torch.equal(model(ids).logits, wanted)


def test_restore_without_the_handle():
    model = tiny()
    apexk.swap(model, apexk.ApexConfig(pool=2))
    assert apexk.restore(model) and not apexk.restore(model)
    assert not [n for n, m in model.named_modules() if "forward" in vars(m)]


def test_swap_and_restore_hold_no_second_copy():
    """Peak memory of this process stays within a layer and a bit of what the model needs, there and back and there again."""
    code = """
import torch, apexk
from apexk.testing.tiny import tiny
def peak():
    return int(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))) / 1024
def reset():
    open('/proc/self/clear_refs', 'w').write('5')
model = tiny('qwen3_moe', hidden_size=512, moe_intermediate_size=512, num_experts=16, num_hidden_layers=6)
layer = 16 * 3 * 512 * 512 * 4 / 2**20
apexk.swap(model, apexk.ApexConfig(pool=0)).restore()  # from now on the experts lie in memory of their own
for turn in range(2):
    reset(); before = peak()
    handle = apexk.swap(model, apexk.ApexConfig(pool=0))
    there = peak() - before
    reset(); before = peak()
    handle.restore()
    print(round(there / layer, 2), round((peak() - before) / layer, 2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    figures = [float(word) for word in done.stdout.split()]
    assert len(figures) == 4 and max(figures) < 2, f"peaks in layers: {figures}"


def test_a_pass_in_inference_mode_and_outside():
    model, ids = tiny(), torch.arange(6)[None]
    with torch.inference_mode():
        wanted = model(ids).logits.clone()
        handle = apexk.swap(model, apexk.ApexConfig(pool=2))
    torch.testing.assert_close(model(ids).logits, wanted)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, wanted)
        handle.restore()
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[1].mlp.experts.down_proj.grad is not None


def test_a_compiled_model_runs_the_engine():
    model, ids = tiny(), torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        with apexk.swap(model, apexk.ApexConfig(pool=2)) as handle:
            torch.testing.assert_close(torch.compile(model, backend="eager")(ids).logits, wanted)
            assert handle.summary()["prefill"]["layers"] == 2
    torch._dynamo.reset()


def test_threads_take_turns():
    model, batches = tiny(), [torch.randint(0, 64, (2, 9)) for _ in range(4)]
    with torch.no_grad():
        wanted = [model(ids).logits for ids in batches]
    found: dict[int, bool] = {}

    def work(i):
        with torch.no_grad():
            found[i] = all(torch.allclose(model(batches[i]).logits, wanted[i], rtol=1e-4, atol=1e-5) for _ in range(8))

    with apexk.swap(model, apexk.ApexConfig(pool=2)):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == dict.fromkeys(range(4), True)


def test_popularity_counts_what_the_routers_choose():
    model, ids = tiny(), torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    wanted = [torch.bincount(layer.topk(2).indices.flatten(), minlength=4).tolist() for layer in logits]
    assert apexk.popularity(model, [{"input_ids": ids}]) == wanted
    with apexk.swap(model, apexk.ApexConfig(pool=2, popularity=wanted)) as handle:
        first = handle.engine.slots[0].resident()
    assert first == set(sorted(range(4), key=lambda e: (-wanted[0][e], e))[:2])
