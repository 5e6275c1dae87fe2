"""A loaded model is the one that `from_pretrained` gives, bit for bit, whatever the family and the format on disk."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from checkpoints import change_config, rewrite, tensors_of, write
from transformers import AutoModelForCausalLM

import apexk
from apexk.testing import loading
from apexk.testing.tiny import CONFIGS

IDS = torch.arange(3, 21).reshape(2, 9)


def assert_same(state, wanted):
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


@pytest.mark.parametrize("original", [True, False], ids=["original", "fused"])
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_every_family_in_both_formats(tmp_path, model_type, original):
    write(tmp_path / "a", model_type, original)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    wanted = plain.state_dict()
    model, handle = apexk.load(tmp_path / "a", apexk.ApexConfig(pool=2))
    assert type(model) is type(plain) and not model.training
    assert_same(model.state_dict(), wanted)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    model.save_pretrained(tmp_path / "b")  # while swapped: the format that was read
    read, written = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], written[name]) for name in read)
    handle.restore()
    assert_same(model.state_dict(), wanted)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_it_generates_what_the_plain_model_does(tmp_path):
    plain = write(tmp_path, dtype=torch.float32)
    model, handle = apexk.load(tmp_path, apexk.ApexConfig(pool=3))
    with handle, torch.no_grad():
        assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), plain.generate(IDS, max_new_tokens=8, do_sample=False))
        assert handle.summary()["decode"]["steps"] == 7
    assert model.generation_config.eos_token_id == plain.generation_config.eos_token_id


@pytest.mark.parametrize("shards", [2, 7])
def test_shards(tmp_path, shards):
    model = write(tmp_path)
    rewrite(tmp_path, tensors_of(tmp_path), shards)
    loaded, handle = apexk.load(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())
    handle.restore()


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float32, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_another_dtype_than_the_stored_one(tmp_path, model_type, stored, dtype):
    """Each value is converted once, by rounding; what a family keeps in float32 stays so."""
    model = write(tmp_path, model_type, dtype=stored)
    loaded, handle = apexk.load(tmp_path, dtype=dtype)
    state = loaded.state_dict()
    assert_same(state, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict())
    assert all(torch.equal(state[name], value.to(dtype)) for name, value in model.state_dict().items() if ".experts." in name)
    handle.restore()


def test_without_a_dtype_in_the_configuration_the_stored_one_is_kept(tmp_path):
    model = write(tmp_path, dtype=torch.float16)
    change_config(tmp_path, dtype=None)
    loaded, handle = apexk.load(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())
    handle.restore()


def test_layers_for_multi_token_prediction_are_left_out(tmp_path, caplog):
    """Their names look like those of layers: `mtp.layers.0`, or a layer behind the last."""
    model = write(tmp_path)
    tensors = tensors_of(tmp_path)
    block = {name: t for name, t in tensors.items() if name.startswith("model.layers.0.")}
    extra = {name.replace("model.layers.0.", prefix): torch.full_like(t, 9.0) for name, t in block.items() for prefix in ("mtp.layers.0.", "model.layers.4.")}
    rewrite(tmp_path, tensors | extra)
    with caplog.at_level(logging.INFO, "apexk.hf.loader"):
        loaded, handle = apexk.load(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())
    assert f"{len(extra)} tensors are left out" in caplog.text
    handle.restore()


def test_a_configuration_of_images_and_text_loads_its_text_model(tmp_path):
    """As released: the text model's tensors under `model.language_model`, and a tower that it has no place for."""
    model = write(tmp_path, "qwen3_5_moe_text")
    config = model.config.to_dict()
    change_config(tmp_path, model_type="qwen3_5_moe", text_config=config, architectures=["Qwen3_5MoeForConditionalGeneration"])
    named = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors_of(tmp_path).items()}
    rewrite(tmp_path, named | {"model.visual.patch_embed.proj.weight": torch.ones(3, 3)})
    loaded, handle = apexk.load(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())
    handle.restore()


def test_remote_code_runs_only_when_it_is_allowed(tmp_path):
    write(tmp_path, original=False)
    marker = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(
        "import pathlib\n"
        f"pathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM\n"
        "class MineConfig(Qwen3MoeConfig):\n    pass\n"
        "class Mine(Qwen3MoeForCausalLM):\n    config_class = MineConfig\n"
    )
    change_config(tmp_path, auto_map={"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}, model_type="not_in_the_library")
    with pytest.raises(ValueError, match="trust_remote_code"):
        apexk.load(tmp_path)
    assert not marker.exists()
    change_config(tmp_path, model_type="qwen3_moe")
    model, handle = apexk.load(tmp_path)  # the library's own class serves
    assert not marker.exists() and type(model).__name__ == "Qwen3MoeForCausalLM"
    handle.restore()
    model, handle = apexk.load(tmp_path, trust_remote_code=True)
    assert marker.exists() and type(model).__name__ == "Mine"
    handle.restore()


@pytest.mark.parametrize(("form", "mib"), [("per-expert", 192), *(pytest.param(form, 768, marks=pytest.mark.nightly) for form in ("per-expert", "fused"))])
def test_peak_memory_is_the_model_and_little_else(tmp_path, mib, form):
    """Growth of the peak resident memory from just before the load: at most 1.06 x the parameters, and what modules that
    the first model of a process imports take (16 MiB)."""
    loading.write(tmp_path, mib, form)
    code = "import json; from pathlib import Path; from apexk.testing import loading\n"
    done = subprocess.run([sys.executable, "-c", code + f"print(json.dumps(loading.measure('apexk', Path({str(tmp_path)!r}), warm=True)))"],
                          check=True, capture_output=True, text=True)
    result = json.loads(done.stdout)
    assert result["parameter_bytes"] > mib << 20
    assert result["peak_growth_bytes"] <= 1.06 * result["parameter_bytes"] + (16 << 20 if mib < 768 else 0)
