"""`experts_implementation="apexk"`: the library's own registry as a way in."""

import copy
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

import apexk
from apexk.testing.tiny import tiny

IDS = torch.arange(3, 15)[None]


@pytest.fixture(autouse=True)
def registered():
    assert apexk.register() == apexk.register() == "apexk"


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "qwen3_next", "deepseek_v3", "jamba"])
def test_swapped_at_its_experts(model_type):
    model = tiny(model_type)
    with torch.no_grad():
        wanted = model(IDS).logits
        tokens = model.generate(IDS, max_new_tokens=5, do_sample=False)
        model.set_experts_implementation("apexk")
        with apexk.swap(model, apexk.ApexConfig(pool=3)) as handle:
            assert handle.info()["model"]["replaced"] == "experts"
            torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
            assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), tokens)
            sums = handle.summary()
            assert sums["prefill"]["steps"] == 2 and sums["decode"]["steps"] == 4, "rows alone do not say which phase it is"
            twin = copy.deepcopy(model)
            torch.testing.assert_close(twin(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
            assert handle.summary()["prefill"]["steps"] == 2
        assert not [n for n, m in model.named_modules() if "forward" in vars(m)]
        torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-4, atol=1e-4)


def test_by_from_pretrained(tmp_path):
    plain = tiny("qwen3_moe")
    plain.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="apexk").eval()
    with torch.no_grad(), apexk.swap(model, apexk.ApexConfig(pool=2)) as handle:
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)
        assert handle.summary()["prefill"]["layers"] == 4 and handle.summary()["prefill"]["speculative"] >= 0


@pytest.mark.parametrize("model_type", ["llama4_text", "dbrx"])
def test_where_it_does_not_take_the_blocks_are_replaced(model_type, caplog):
    model = tiny(model_type)
    model.config._experts_implementation = "apexk"
    with torch.no_grad():
        wanted = model(IDS).logits
        with caplog.at_level(logging.WARNING, "apexk"), apexk.swap(model, apexk.ApexConfig(pool=2)) as handle:
            assert handle.info()["model"]["replaced"] == "blocks"
            torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    assert "did not take" in caplog.text
