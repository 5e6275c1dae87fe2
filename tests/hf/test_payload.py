"""Lossy transfers: what is computed, what is timed and counted, what says so, and what is refused."""

import copy

import pytest
import torch

import apexk
from apexk import hardware
from apexk.config import PAYLOADS
from apexk.demo import model as demo
from apexk.device.checked import CheckedDevice
from apexk.hf import swap as seam
from apexk.hf.inspect import find_experts
from apexk.store.block import ExpertBlock
from apexk.store.quantised import BITS, Payload
from apexk.timeline.reader import read

INPUT = "In the beginning was the word, and the light of"


def rounded(model, name):
    """The model with every expert weight replaced by what a payload of it stands for; by plain tensor arithmetic."""
    made, most = copy.deepcopy(model), 2.0 ** (BITS[name] - 1) - 1
    experts = find_experts(made)
    with torch.no_grad():
        for layer in range(len(experts.blocks)):
            for parameter in experts.weights(layer).parameters():
                *front, k = parameter.shape
                grouped = torch.nn.functional.pad(parameter, (0, -k % 64)).reshape(*front, -1, 64)
                scale = (grouped.abs().amax(-1, keepdim=True) / most).half().float()
                value = torch.where(scale > 0, (grouped / scale).round().clamp(-most, most) * scale, 0.0)
                parameter.copy_(value.reshape(*front, -1)[..., :k])
    return made


def logits(model, tokenizer):
    with torch.no_grad():
        return model(**tokenizer(INPUT, return_tensors="pt")).logits


def test_the_names_are_the_stores():
    assert PAYLOADS == ("plain", *BITS)


@pytest.mark.parametrize("name", BITS)
def test_all_on_the_gpu_is_the_model_with_rounded_weights(name, trained):
    """Policies whose CPU runs nothing, from all experts resident to copies on demand in waves."""
    model, tokenizer = trained()
    plain, want = logits(model, tokenizer), logits(rounded(model, name), tokenizer)
    lost = (want - plain).abs().max()
    for policy, pool in (("no_assign", 32), ("mira", 6), ("mixtral_offloading", 2)):
        with apexk.swap(model, apexk.ApexConfig(policy=policy, pool=pool, payload=name)):
            got = logits(model, tokenizer)
        assert (got - want).abs().max() < lost / 100, (policy, pool)
    with apexk.swap(model, apexk.ApexConfig(policy="no_assign", pool=0, payload=name)):
        assert (logits(model, tokenizer) - plain).abs().max() < lost / 100, "the CPU computes from the plain weights"
    assert torch.equal(logits(model, tokenizer), plain)


@pytest.mark.parametrize("name", BITS)
def test_copies_move_and_take_less_and_say_so(name, trained, tmp_path):
    model, tokenizer = trained()
    experts = find_experts(model)
    payload = Payload(ExpertBlock(experts.hidden, experts.intermediate, torch.float32), name)
    machine = hardware.load("pinned-link")
    with apexk.swap(model, apexk.ApexConfig(policy="mira", pool=6, payload=name, hardware="pinned-link", timeline=tmp_path / "t.jsonl")) as handle:
        demo.generate(model, tokenizer, [INPUT], 6)
        info, totals = handle.info(), handle.engine.totals["decode"]
        assert totals.bytes == payload.nbytes * (totals.exact + totals.speculative) > 0
    assert info["lossless"] is False and info["copy_bytes"] == payload.nbytes and info["config"]["payload"] == name
    recording = read(tmp_path / "t.jsonl")
    assert recording.header["config"]["payload"] == name
    copies = [row for row in recording.rows if row["kind"] == "copy.exact"]
    wanted = payload.ratio * machine.link.t1 + (1 + payload.ratio) * machine.gpu.g1
    times = {row["end_ns"] - row["start_ns"] for row in copies}
    assert times and times <= {round(1e6 * wanted), round(1e6 * (wanted + machine.link.s0))}
    assert {row["bytes"] for row in copies} == {payload.nbytes}


def test_plain_is_lossless(trained):
    with apexk.swap(trained()[0]) as handle:
        info = handle.info()
    assert info["lossless"] is True and info["copy_bytes"] == info["model"]["bytes_per_expert"]
    assert (info["evict"], info["pool_scope"]) == ("learnt", "layer")


def test_slots_are_dequantised_before_they_are_read(trained, monkeypatch):
    """Copy and dequantisation are one operation of the channel: the ordering check holds for both."""
    model, tokenizer = trained()
    real = seam.VirtualDevice
    monkeypatch.setattr(seam, "VirtualDevice", lambda *args: CheckedDevice(real(*args)))
    with apexk.swap(model, apexk.ApexConfig(policy="apex", pool=8, payload="int4")) as handle:
        demo.generate(model, tokenizer, [INPUT, "And"], 6)
        assert handle.engine.totals["decode"].exact > 0


def test_written_weights_are_packed_anew(trained):
    """What a slot holds follows load_state_dict, as it does without a payload."""
    model, tokenizer = trained()
    with apexk.swap(model, apexk.ApexConfig(policy="no_assign", pool=32, payload="int8")):
        before = logits(model, tokenizer)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict({name: value * 0 if "experts" in name else value for name, value in kept.items()})
        without = logits(model, tokenizer)
        model.load_state_dict(kept)
        assert not torch.equal(without, before) and torch.equal(logits(model, tokenizer), before)


def test_refusals(trained):
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=f"payload is 'int8', but device '{device}'"):
            apexk.ApexConfig(device=device, payload="int8")
    with pytest.raises(ValueError, match="payload is 'int2'; there are plain, int8, int4"):
        apexk.ApexConfig(payload="int2")
    model = copy.deepcopy(trained()[0])
    parameter = next(find_experts(model).weights(1).parameters())
    with torch.no_grad():
        parameter.view(-1)[5] = 1e6
    before = parameter.clone()
    with pytest.raises(ValueError, match=r"layers\.\d.*: a weight is not finite or above 32768"):
        apexk.swap(model, apexk.ApexConfig(payload="int8"))
    assert torch.equal(parameter, before)
    with apexk.swap(model, apexk.ApexConfig()):
        pass
