"""The device without a GPU: the same tokens, real times, no slots."""

import pytest
import torch

import apexk
from apexk.demo import model as demo
from apexk.timeline import read


def test_tokens_are_the_unpatched_models(trained):
    model, tokenizer = trained()
    for count in (1, 3, 8):
        texts = demo.prompts(count, seed=count)
        wanted = demo.generate(model, tokenizer, texts, 10)
        with apexk.swap(model, apexk.ApexConfig(device="cpu")):
            assert torch.equal(demo.generate(model, tokenizer, texts, 10), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bitwise_the_virtual_device_with_the_same_arithmetic(trained, dtype):
    model, tokenizer = trained(dtype)
    batch = tokenizer(demo.prompts(3), return_tensors="pt", padding=True)
    logits = []
    for config in (apexk.ApexConfig(device="cpu", arithmetic="same"), apexk.ApexConfig(pool=8, arithmetic="same")):
        with apexk.swap(model, config), torch.no_grad():
            logits.append(model(**batch).logits)
    assert torch.equal(*logits)


def test_times_are_measured_and_in_order(trained, tmp_path):
    model, tokenizer = trained()
    path = tmp_path / "t.jsonl"
    with apexk.swap(model, apexk.ApexConfig(device="cpu", timeline=path)) as handle:
        demo.generate(model, tokenizer, demo.prompts(2), 5)
        decode, info = handle.summary()["decode"], handle.info()
    recording = read(path)
    assert info["modelled"] is False and recording.header["hardware"] == "this machine, measured"
    assert {row["modelled"] for row in recording.rows} == {False}
    assert decode["steps"] == 4 and decode["layers"] == 16 and decode["step_ms"] > decode["cpu_path_ms"] > 0
    assert decode["exact"] == decode["speculative"] == decode["hits"] == 0
    layers = [row for row in recording.rows if row["kind"] in ("attention", "route", "host.ffn", "combine")]
    assert [row["kind"] for row in layers[:4]] == ["attention", "route", "host.ffn", "combine"]
    assert all(a["end_ns"] <= b["end_ns"] for a, b in zip(layers, layers[1:], strict=False))


def test_a_pool_is_refused():
    with pytest.raises(ValueError, match="no expert slots"):
        apexk.ApexConfig(device="cpu", pool=4).slots(32)
    assert apexk.ApexConfig(device="cpu").slots(32) == apexk.ApexConfig(device="cpu", pool=0).slots(32) == 0


def test_a_worker_error_reaches_the_caller(trained, monkeypatch):
    """What the native library refuses is raised in the model's thread, and the next call works."""
    model, tokenizer = trained()
    texts = demo.prompts(2)
    wanted = demo.generate(model, tokenizer, texts, 4)
    with apexk.swap(model, apexk.ApexConfig(device="cpu")) as handle:
        blocks = handle._device.halves._host_blocks
        good = blocks[2]
        blocks[2] = torch.zeros_like(good)
        with pytest.raises(ValueError, match="block|host"):
            demo.generate(model, tokenizer, texts, 4)
        blocks[2] = good
        assert torch.equal(demo.generate(model, tokenizer, texts, 4), wanted)
