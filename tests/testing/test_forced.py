"""Routing forced from a trace is the trace's, plain or swapped, and goes away again."""

import numpy as np
import pytest
import torch

import apexk
from apexk.hf.inspect import UnsupportedModel
from apexk.sim.generate import Shape, generate
from apexk.sim.record import Recorder
from apexk.testing.forced import forced
from apexk.testing.tiny import tiny

BATCH, PROMPT, NEW = 3, 5, 6


def run(model):
    ids = torch.arange(3, 3 + BATCH * PROMPT).reshape(BATCH, PROMPT)
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=NEW, do_sample=False)


@pytest.fixture
def trace():
    return generate("sticky", shape=Shape("tiny", 6, 8, 2), batch=BATCH, steps=NEW - 1)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_the_engine_gets_the_traces_ids(model_type, trace):
    model = tiny(model_type)
    before = run(model)
    with apexk.swap(model, apexk.ApexConfig(pool=3)) as handle, forced(model, trace) as routing:
        layers = handle.header()["model"]["moe_layers"]
        handle.engine.recorder = recorder = Recorder(BATCH, 8, "tiny")
        swapped = run(model)
    found = recorder.trace()
    prefill = BATCH * PROMPT
    decode = found.routed_experts[prefill:]
    assert np.array_equal(decode, trace.routed_experts[:, :layers]), "one step of the trace a decode step"
    assert np.array_equal(found.routed_experts[:prefill], trace.routed_experts[np.arange(prefill) % trace.tokens, :layers])
    assert np.array_equal(found.predicted_experts[prefill:, 1:], trace.predicted_experts[:, 1:layers])
    assert routing.passes == NEW and routing.source == trace.source
    with forced(model, trace):
        assert torch.equal(run(model), swapped), "the plain model under the same routing"
    assert torch.equal(run(model), before)
    assert not [name for name, module in model.named_modules() if "forward" in vars(module) or module._forward_pre_hooks]


def test_what_does_not_fit_is_refused(trace):
    with pytest.raises(ValueError, match="6 layers, 8 experts, top-2; the model has 4 sparse layers of 4 experts"), forced(tiny("qwen3_moe", num_experts=4), trace):
        pass
    with pytest.raises(ValueError, match="the model has 7"), forced(tiny("qwen3_moe", num_hidden_layers=7), trace):
        pass
    with pytest.raises(UnsupportedModel, match="llama4_text"), forced(tiny("llama4_text"), trace):
        pass


def test_an_exception_inside_leaves_the_model_as_it_was(trace):
    model = tiny("qwen3_moe")
    with pytest.raises(KeyError), forced(model, trace):
        raise KeyError
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
