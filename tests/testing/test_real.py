"""Models of real shapes: their numbers against the ones that are published, and reduced depth."""

import pytest
import torch

import apexk
import apexk.testing
from apexk.hf.inspect import find_experts
from apexk.hf.loader.skeleton import skeleton
from apexk.store.block import ExpertBlock
from apexk.testing.real import random_weights, real_config
from apexk.testing.shapes import shapes


@pytest.mark.parametrize("name", sorted(shapes()))
def test_the_configuration_has_the_published_numbers(name):
    """At full depth, as a skeleton: no memory is taken."""
    shape = shapes()[name]
    experts = find_experts(skeleton(real_config(name), torch.bfloat16))
    assert (experts.hidden, experts.intermediate, experts.experts, experts.topk) == (shape.hidden, shape.moe_intermediate, shape.num_experts, shape.top_k)
    assert len(experts.blocks) == shape.moe_layers and experts.model_type == shape.model_type
    block = ExpertBlock(experts.hidden, experts.intermediate, experts.dtype, experts.biases)
    assert block.payload_bytes == shape.bytes_per_expert
    shallow = skeleton(real_config(name, layers=2), torch.bfloat16)
    assert len(find_experts(shallow).blocks) == 2
    assert shallow.config.num_hidden_layers == 2 + shape.layers - shape.moe_layers


#: small enough for a test, everything else as it is
NARROW = {"vocab_size": 512, "num_experts": 16, "num_experts_per_tok": 2}


def test_a_model_with_one_layer_runs_swapped_and_plain():
    model = apexk.testing.random_model("qwen3-30b-a3b", layers=1, **NARROW)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    ids = torch.arange(8)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        assert wanted.isfinite().all() and wanted.std() > 0.01
        with apexk.swap(model, apexk.ApexConfig(pool=4)):
            torch.testing.assert_close(model(ids).logits, wanted, rtol=0.05, atol=0.05)


def test_weights_depend_on_the_seed_alone():
    def weights(seed):
        torch.manual_seed(torch.randint(0, 100, ()).item())
        model = random_weights(real_config("olmoe-1b-7b-0924", 1, vocab_size=256, num_experts=4, num_experts_per_tok=2), seed=seed)
        return model.state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    experts = first["model.layers.0.mlp.experts.gate_up_proj"]
    assert not torch.equal(experts, other["model.layers.0.mlp.experts.gate_up_proj"])
    assert abs(float(experts.float().std()) - 0.02) < 1e-3 and abs(float(experts.float().mean())) < 1e-3
    assert len({tuple(experts[e, 0, :8].tolist()) for e in range(4)}) == 4, "no two experts are alike"
    assert torch.equal(first["model.norm.weight"], torch.ones(2048)), "norms have the family's own first values"


def test_saving_writes_the_familys_format(tmp_path):
    from safetensors import safe_open

    apexk.testing.random_model("olmoe-1b-7b-0924", 1, vocab_size=256, num_experts=2, num_experts_per_tok=1).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "model.layers.0.mlp.experts.1.up_proj.weight" in file.keys()  # noqa: SIM118


@pytest.mark.parametrize(("name", "layers", "changes", "said"), [
    ("qwen4", None, {}, "no shape named 'qwen4'.*qwen3.5-35b-a3b"),
    ("glm-4.5-air", 46, {}, "45 sparse layers: wanted 1..45"),
    ("glm-4.5-air", 0, {}, "wanted 1..45"),
    ("glm-4.5-air", 1, {"hiden_size": 3}, "hiden_size is no field"),
])  # fmt: skip
def test_what_there_is_not(name, layers, changes, said):
    with pytest.raises(ValueError, match=said):
        apexk.testing.random_model(name, layers, **changes)
