"""Swapping in and out: the model comes back bit for bit, whatever happened in between, and bad input changes nothing."""

import subprocess
import sys
import threading

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import apexk
from apexk.demo import model as demo
from apexk.testing.tiny import tiny as tiny_family


def snapshot(model):
    """Values, identity and strides of every parameter, and every block's own `forward`."""
    return {n: (p.detach().clone(), id(p), p.stride(), p.dtype, p.requires_grad) for n, p in model.named_parameters()}


def assert_as_before(model, before, keys):
    assert list(model.state_dict()) == keys
    for name, parameter in model.named_parameters():
        value, identity, stride, dtype, grad = before[name]
        assert id(parameter) == identity and parameter.stride() == stride and parameter.dtype == dtype
        assert parameter.requires_grad == grad
        assert torch.equal(parameter, value), name
    assert not [n for n, m in model.named_modules() if "forward" in vars(m)]


def native_threads():
    import os

    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def fresh():
    model, tokenizer = demo.load()
    return model, tokenizer, snapshot(model), list(model.state_dict())


def test_restore_is_bit_exact_and_stops_every_thread(fresh):
    model, tokenizer, before, keys = fresh
    texts = demo.prompts(2)
    demo.generate(model, tokenizer, texts, 2)  # torch's own threads start here
    threads = native_threads()
    handle = apexk.swap(model, apexk.ApexConfig(pool=4))
    demo.generate(model, tokenizer, texts, 4)
    handle.restore()
    handle.restore()
    assert_as_before(model, before, keys)
    assert native_threads() == threads
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


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["read_back", "run_host", "copy_expert", "run_slots", "predict", "speculate", "combine", "attention"])
def test_an_exception_in_the_middle_of_generate(fresh, monkeypatch, kind, where):
    """At any point of a step: the swapped model works again at once, and restores to what it was."""
    model, tokenizer, before, keys = fresh
    texts = demo.prompts(3)
    wanted = demo.generate(model, tokenizer, texts, 6)
    handle = apexk.swap(model, apexk.ApexConfig(policy="apex", pool=4))
    owner = model.model.layers[1].self_attn if where == "attention" else handle._device
    name = "forward" if where == "attention" else where
    real, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            raise kind("injected")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(kind):
            demo.generate(model, tokenizer, texts, 12)
    assert torch.equal(demo.generate(model, tokenizer, texts, 6), wanted), "the swapped model goes on"
    handle.restore()
    assert_as_before(model, before, keys)
    assert torch.equal(demo.generate(model, tokenizer, texts, 6), wanted)


def test_an_interrupt_while_weights_move(fresh, monkeypatch):
    from apexk.store.host_store import HostStore

    model, _, before, keys = fresh
    real, threads = HostStore.put, native_threads()

    def failing(self, layer, w13, w2):
        if layer == 2:
            raise KeyboardInterrupt
        real(self, layer, w13, w2)

    monkeypatch.setattr(HostStore, "put", failing)
    with pytest.raises(KeyboardInterrupt):
        apexk.swap(model, apexk.ApexConfig(pool=4))
    assert_as_before(model, before, keys)
    assert native_threads() == threads


def test_context_manager_restores_after_an_error(fresh):
    model, _, before, keys = fresh
    with pytest.raises(Stop):
        with apexk.swap(model, apexk.ApexConfig(pool=2)):
            raise Stop
    assert_as_before(model, before, keys)


def test_swap_again_with_another_pool(fresh):
    model, tokenizer, before, keys = fresh
    texts = demo.prompts(2)
    wanted = demo.generate(model, tokenizer, texts, 6)
    for pool in (0, 32, 3):
        with apexk.swap(model, apexk.ApexConfig(pool=pool)):
            assert torch.equal(demo.generate(model, tokenizer, texts, 6), wanted)
    assert_as_before(model, before, keys)


def tiny(**changes):
    config = dict(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(config | changes))).eval()


def dense():
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))


def quantised():
    model = tiny()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def marked_quantised():
    model = tiny()
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def on_meta():
    return tiny().to("meta")


BAD_MODELS = [
    (dense, {}, "dense"),
    (lambda: tiny_family("dbrx"), {}, "does not know.*qwen3_moe"),
    (lambda: torch.nn.Linear(2, 2), {}, "no Hugging Face model"),
    (lambda: tiny(mlp_only_layers=[0, 1]), {}, "every layer"),
    (lambda: tiny(hidden_act="relu"), {}, "experts apply"),
    (quantised, {}, "quantised"),
    (marked_quantised, {}, "quantised"),
    (on_meta, {}, "meta"),
    (lambda: tiny().double(), {}, "float64"),
    (tiny, {"pool": 5}, "pool is 5.*4 experts"),
    (tiny, {"hardware": "h900"}, "a6000-paper"),
    (tiny, {"popularity": [[1, 2, 3, 4]]}, "popularity"),
    (tiny, {"timeline": "/nonexistent/folder/t.jsonl"}, "nonexistent"),
]


@pytest.mark.parametrize(("make", "config", "said"), BAD_MODELS, ids=lambda v: getattr(v, "__name__", str(v))[:30])
def test_bad_input_is_refused_and_changes_nothing(make, config, said):
    model = make()
    before, threads = list(vars(model)), native_threads()
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises((ValueError, TypeError, OSError), match=f"(?s){said}"):
        apexk.swap(model, apexk.ApexConfig(**config))
    assert list(vars(model)) == before and [p.data_ptr() for p in model.parameters()] == pointers
    assert native_threads() == threads and threading.active_count() >= 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"policy": "best"}, "apex"),
        ({"pool": -1}, "pool"),
        ({"pool": 2.5}, "pool"),
        ({"pool": True}, "pool"),
        ({"threads": 0}, "threads"),
        ({"device": "tpu"}, "virtual"),
        ({"arithmetic": "exact"}, "arithmetic"),
        ({"in_flight": "wait"}, "in_flight"),
        ({"cost": "cubic"}, "cost"),
        ({"utility_decay": 1.5}, "utility_decay"),
        ({"rate_ema": "often"}, "rate_ema"),
        ({"resident_first": "no"}, "resident_first"),
    ],
    ids=str,
)
def test_bad_config(config, said):
    with pytest.raises((ValueError, TypeError), match=said):
        apexk.ApexConfig(**config)


def test_swapping_twice_is_refused():
    model = tiny()
    with apexk.swap(model, apexk.ApexConfig(pool=1)):
        with pytest.raises(RuntimeError, match="already"):
            apexk.swap(model)
    apexk.swap(model).restore()


def test_config_of_the_wrong_type():
    with pytest.raises(TypeError, match="ApexConfig"):
        apexk.swap(tiny(), {"pool": 2})


def test_training_is_refused_and_a_bare_forward_works():
    model, ids = tiny(), torch.arange(6)[None]
    with apexk.swap(model, apexk.ApexConfig(pool=2)):
        assert model(ids).logits.shape == (1, 6, 64), "eval mode outside no_grad"
        model.train()
        with pytest.raises(RuntimeError, match="eval"):
            model(ids)
        model.eval()


def test_weights_replaced_while_swapped_are_noticed():
    model, ids = tiny(), torch.arange(6)[None]
    handle = apexk.swap(model, apexk.ApexConfig(pool=2))
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="restore first"), torch.no_grad():
        model(ids)
    handle.restore()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, "the user's change stays"
    with torch.no_grad():
        model(ids)


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


def test_a_backward_pass_is_refused():
    """A gradient through detached experts would be silently wrong."""
    model, ids = tiny(), torch.arange(6)[None]
    with apexk.swap(model, apexk.ApexConfig(pool=2)):
        loss = model(ids, labels=ids).loss
        with pytest.raises(RuntimeError, match="inference"):
            loss.backward()
    model(ids, labels=ids).loss.backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad is not None


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


def test_a_used_handle_is_refused():
    handle = apexk.swap(tiny(), apexk.ApexConfig(pool=2))
    handle.restore()
    with pytest.raises(RuntimeError, match="restored"), handle:
        pass


def test_two_runs_into_one_timeline_are_refused(tmp_path):
    path = tmp_path / "t.jsonl"
    model = tiny()
    with apexk.swap(tiny(), apexk.ApexConfig(pool=2, timeline=path)):
        with pytest.raises(OSError, match="another run"):
            apexk.swap(model, apexk.ApexConfig(pool=2, timeline=path))
        apexk.swap(model, apexk.ApexConfig(pool=2)).restore()
    assert path.exists()


def test_a_timeline_that_cannot_be_finished_leaves_the_model_restored(tmp_path):
    path = tmp_path / "t.jsonl"
    model = tiny()
    handle = apexk.swap(model, apexk.ApexConfig(pool=2, timeline=path))
    (tmp_path / "t.jsonl.partial").unlink()
    with pytest.raises(OSError, match="the model is restored"):
        handle.restore()
    assert handle.info()["restored"] and "forward" not in vars(model.model.layers[0].mlp)
    assert "restored" in repr(handle)


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


def test_shared_experts_are_refused():
    model = tiny()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj = first.gate_up_proj
    with pytest.raises(ValueError, match="share"):
        apexk.swap(model)


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


def test_an_interrupted_restart_starts_over(fresh, monkeypatch):
    """A second interrupt, while slots are being filled again after the first, leaves nothing stale behind."""
    model, tokenizer, *_ = fresh
    texts = demo.prompts(2)
    wanted = demo.generate(model, tokenizer, texts, 5)
    for nth in (1, 3, 7):
        with apexk.swap(model, apexk.ApexConfig(pool=4)) as handle:
            for name in ("run_host", "load_initial"):
                real, calls = getattr(handle._device, name), []

                def failing(*args, real=real, calls=calls):
                    calls.append(1)
                    if len(calls) == nth:
                        raise KeyboardInterrupt
                    return real(*args)

                with monkeypatch.context() as patch:
                    patch.setattr(handle._device, name, failing)
                    with pytest.raises(KeyboardInterrupt):
                        demo.generate(model, tokenizer, texts, 5)
            assert torch.equal(demo.generate(model, tokenizer, texts, 5), wanted)


def test_popularity_counts_what_the_routers_choose():
    model, ids = tiny(), torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits
    wanted = [torch.bincount(layer.topk(2).indices.flatten(), minlength=4).tolist() for layer in logits]
    assert apexk.popularity(model, [{"input_ids": ids}]) == wanted
    with apexk.swap(model, apexk.ApexConfig(pool=2, popularity=wanted)) as handle:
        first = handle.engine.slots[0].resident()
    assert first == set(sorted(range(4), key=lambda e: (-wanted[0][e], e))[:2])
