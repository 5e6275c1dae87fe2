"""Exceptions and Ctrl-C at any moment: the swapped model goes on, and restores to what it was."""

import pytest
import torch
from hf_models import assert_as_before, tiny

import apexk
from apexk.demo import model as demo


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["read_back", "run_host", "copy_experts", "run_slots", "predict", "speculate", "combine", "attention"])
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


def test_an_interrupt_while_weights_move(fresh, monkeypatch, native_threads):
    from apexk.hf import adopt

    model, _, before, keys = fresh
    real, ended = adopt.put, native_threads()

    def failing(layout, tensors, store, layer):
        if layer == 2:
            raise KeyboardInterrupt
        real(layout, tensors, store, layer)

    monkeypatch.setattr(adopt, "put", failing)
    with pytest.raises(KeyboardInterrupt):
        apexk.swap(model, apexk.ApexConfig(pool=4))
    assert_as_before(model, before, keys)
    assert ended()


def test_context_manager_restores_after_an_error(fresh):
    model, _, before, keys = fresh
    with pytest.raises(Stop):
        with apexk.swap(model, apexk.ApexConfig(pool=2)):
            raise Stop
    assert_as_before(model, before, keys)


def test_an_interrupted_restart_starts_over(fresh, monkeypatch):
    """A second interrupt, while slots are being filled again after the first, leaves nothing stale behind."""
    model, tokenizer, *_ = fresh
    texts = demo.prompts(2)
    wanted = demo.generate(model, tokenizer, texts, 5)
    for nth in (1, 3, 7):
        with apexk.swap(model, apexk.ApexConfig(pool=4)) as handle:
            for name in ("run_host", "load_initial"):
                real, calls = getattr(handle._device, name), []

                def failing(*args, real=real, calls=calls, nth=nth):
                    calls.append(1)
                    if len(calls) == nth:
                        raise KeyboardInterrupt
                    return real(*args)

                with monkeypatch.context() as patch:
                    patch.setattr(handle._device, name, failing)
                    with pytest.raises(KeyboardInterrupt):
                        demo.generate(model, tokenizer, texts, 5)
            assert torch.equal(demo.generate(model, tokenizer, texts, 5), wanted)


def test_a_timeline_that_cannot_be_finished_leaves_the_model_restored(tmp_path):
    path = tmp_path / "t.jsonl"
    model = tiny()
    handle = apexk.swap(model, apexk.ApexConfig(pool=2, timeline=path))
    (tmp_path / "t.jsonl.partial").unlink()
    with pytest.raises(OSError, match="the model is restored"):
        handle.restore()
    assert handle.info()["restored"] and "forward" not in vars(model.model.layers[0].mlp)
    assert "restored" in repr(handle)
