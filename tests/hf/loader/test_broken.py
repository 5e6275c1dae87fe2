"""Checkpoints that cannot be loaded are refused before anything is read, with the file or the tensor by name."""

import json
import os
import random
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoints import change_config, rewrite, tensors_of, write
from safetensors.torch import save_file

import apexk
from apexk.hf.inspect import UnsupportedModel
from apexk.hf.loader.fill import Reader
from apexk.hf.loader.headers import CheckpointError, read_headers
from apexk.machine import memory

EXPERT, DENSE = "model.layers.2.mlp.experts.5.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"
FUSED = "model.layers.2.mlp.experts.gate_up_proj"


def without(name):
    return lambda folder, tensors: rewrite(folder, {n: t for n, t in tensors.items() if n != name})


def reshaped(name):
    return lambda folder, tensors: rewrite(folder, tensors | {name: tensors[name][:, :-1].contiguous()})


def renamed(old, new):
    return lambda folder, tensors: rewrite(folder, {n.replace(old, new): t for n, t in tensors.items()})


def cut_off(folder, tensors):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def header_only(folder, tensors):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])


def empty_file(folder, tensors):
    (folder / "model.safetensors").write_bytes(b"")


def no_json(folder, tensors):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 16) + b"{" * 16)


def index_of(folder, tensors, file):
    """An index that names `file` for every tensor; it is there."""
    (folder.parent / "other").mkdir(exist_ok=True)
    (folder / "model.safetensors").rename(folder.parent / "other" / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))


def header(change):
    """Changes the header's table, leaving the tensors where they are."""

    def apply(folder, tensors):
        file = folder / "model.safetensors"
        data = file.read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        text = change(json.loads(data[8 : 8 + length]))
        file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])

    return apply


def wrong_size(table):
    table[EXPERT]["shape"][0] += 1
    return json.dumps(table)


def overlapping(table):
    table[EXPERT]["data_offsets"] = table[DENSE]["data_offsets"]
    table[EXPERT]["shape"] = table[DENSE]["shape"]
    return json.dumps(table)


def unknown_type(table):
    table[EXPERT]["dtype"] = "F4"
    return json.dumps(table)


def type_is_a_list(table):
    table[EXPERT]["dtype"] = []
    return json.dumps(table)


def twice(table):
    return json.dumps(table)[:-1] + f', "{EXPERT}": {json.dumps(table[EXPERT])}}}'


def in_two_files(folder, tensors):
    rewrite(folder, tensors, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in sorted(set(index.values())) if file != index[EXPERT])
    held = {name: tensors[name] for name, file in index.items() if file == other}
    save_file(held | {EXPERT: tensors[EXPERT]}, folder / other)


def shard_missing(folder, tensors):
    rewrite(folder, tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


def not_in_its_file(folder, tensors):
    rewrite(folder, tensors, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = index["weight_map"][DENSE]
    path.write_text(json.dumps(index))


def over_long_file_name(folder, tensors):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {DENSE: "x" * 300}}))


def bad_index(folder, tensors):
    (folder / "model.safetensors.index.json").write_text("[]")


def both_formats(folder, tensors):
    gate, up = ([tensors[f"model.layers.2.mlp.experts.{e}.{w}_proj.weight"] for e in range(8)] for w in ("gate", "up"))
    rewrite(folder, tensors | {FUSED: torch.cat([torch.stack(gate), torch.stack(up)], 1)})


def pickled(folder, tensors):
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")


def nothing(folder, tensors):
    (folder / "model.safetensors").unlink()


def no_config(folder, tensors):
    (folder / "config.json").unlink()


def bad_config(folder, tensors):
    (folder / "config.json").write_text("{")


BROKEN = {
    "cut off": (cut_off, "model.safetensors.*cut off.*should end at"),
    "a header alone": (header_only, "model.safetensors.*cut off"),
    "an empty file": (empty_file, "model.safetensors.*no safetensors file"),
    "no JSON": (no_json, "model.safetensors.*not readable as JSON"),
    "a size that is not the shape's": (header(wrong_size), f"{EXPERT}.*takes .* bytes"),
    "overlapping tensors": (header(overlapping), "begins at byte"),
    "an unknown type": (header(unknown_type), f"{EXPERT}.*'F4'"),
    "a type that is no word": (header(type_is_a_list), rf"{EXPERT} is of type \[\]"),
    "twice in a header": (header(twice), f"{EXPERT} stands twice"),
    "in two files": (in_two_files, f"{EXPERT} is in model-0000.*and in model-0000"),
    "a shard is missing": (shard_missing, "lacks model-00002-of-00003.safetensors"),
    "not in its file": (not_in_its_file, "promises model.layers.0.extra.weight"),
    "a file name that is too long": (over_long_file_name, "lacks x{300}"),
    "a file outside of the folder": (lambda f, t: index_of(f, t, "../other/model.safetensors"), "names '../other/model.safetensors', which is not in the folder"),
    "a file by its whole path": (lambda f, t: index_of(f, t, "/etc/model.safetensors"), "names '/etc/model.safetensors', which is not in the folder"),
    "a bad index": (bad_index, "index.json.*not readable"),
    "an expert's matrix is missing": (without(EXPERT), f"{EXPERT} missing"),
    "an expert is missing": (lambda f, t: rewrite(f, {n: v for n, v in t.items() if ".2.mlp.experts.5." not in n}), "experts.5.*experts.5"),
    "a kind of matrix is missing": (lambda f, t: rewrite(f, {n: v for n, v in t.items() if "up_proj" not in n}), "32 of 64 rows.*missing"),
    "a layer's experts are missing": (lambda f, t: rewrite(f, {n: v for n, v in t.items() if ".2.mlp.experts" not in n}), "layers.2.mlp.experts.gate_up_proj is missing"),
    "a dense tensor is missing": (without(DENSE), f"{DENSE} missing"),
    "an expert of another shape": (reshaped(EXPERT), rf"{EXPERT} in model.safetensors has shape \[32, 63\].*wants \[32, 64\]"),
    "a dense tensor of another shape": (reshaped(DENSE), f"{DENSE} .*has shape .*wants"),
    "an expert too many": (renamed("experts.7.", "experts.8."), "of expert 8, but the configuration gives a layer 8"),
    "an expert that is no number": (renamed(".2.mlp.experts.2.", ".2.mlp.experts.²."), "experts.²..*_proj.weight does not say by a number"),
    "both formats": (both_formats, f"both hold values of {FUSED}"),
    "pickled weights": (pickled, "pytorch_model.bin.*safetensors only"),
    "no weights": (nothing, "neither model.safetensors nor"),
    "no configuration": (no_config, "no config.json"),
    "a configuration that is no JSON": (bad_config, "config.json"),
    "another quantisation": (lambda f, t: change_config(f, quantization_config={"quant_method": "gptq", "bits": 4}), "'gptq'.*fp8, mxfp4"),
    "more experts than there are": (lambda f, t: change_config(f, num_experts=9, num_local_experts=9), "experts.8.*missing"),
    "a setting of another kind": (lambda f, t: change_config(f, use_sliding_window=[1]), "config.json.*use_sliding_window"),
    "a type that is a number": (lambda f, t: change_config(f, dtype=1e308), "config.json"),
    "an activation that nobody knows": (lambda f, t: change_config(f, hidden_act="BOOL"), "no model can be built.*BOOL"),
    "a size that no tensor can have": (lambda f, t: change_config(f, vocab_size=2**63), "no model can be built"),
    "a configuration nested too deep": (lambda f, t: (f / "config.json").write_text("[" * 100_000), "config.json"),
    "more layers than tensors": (lambda f, t: change_config(f, num_hidden_layers=2**31), "wants 2147483648 layers"),
    "another width": (lambda f, t: change_config(f, moe_intermediate_size=16), "has shape"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_wrong_is_named(tmp_path, what):
    write(tmp_path)
    breaking, said = BROKEN[what]
    breaking(tmp_path, tensors_of(tmp_path))
    with pytest.raises(CheckpointError, match=said):
        apexk.load(tmp_path)


def test_a_path_that_is_no_folder():
    with pytest.raises(CheckpointError, match="Qwen/Qwen3-30B-A3B is no folder.*hf download"):
        apexk.load("Qwen/Qwen3-30B-A3B")


def test_other_arguments(tmp_path):
    write(tmp_path)
    with pytest.raises(TypeError, match="ApexConfig"):
        apexk.load(tmp_path, {"pool": 2})
    with pytest.raises(ValueError, match="pool is 9 slots"):
        apexk.load(tmp_path, apexk.ApexConfig(pool=9))
    with pytest.raises(ValueError, match="float8"):
        apexk.load(tmp_path, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="no hardware file"):
        apexk.load(tmp_path, apexk.ApexConfig(hardware="none-such"))


def test_a_dense_model(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Qwen3ForCausalLM(Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                                 head_dim=16)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="dense"):
        apexk.load(tmp_path)


def test_a_model_that_is_no_causal_language_model(tmp_path):
    write(tmp_path)
    change_config(tmp_path, model_type="clip", architectures=["CLIPModel"])
    with pytest.raises(UnsupportedModel, match="'clip' has no causal language model"):
        apexk.load(tmp_path)


def test_too_little_memory_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(memory, "rooms", lambda root=None: [memory.Room("the control group /sys/fs/cgroup/memory.max", 100_000, 200_000)])
    monkeypatch.setattr(Reader, "scatter", lambda *_: pytest.fail("something was read"))
    with pytest.raises(MemoryError, match="are needed .experts .*dense part.*control group /sys/fs/cgroup/memory.max leaves"):
        apexk.load(tmp_path)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("where", ["self_attn", ".experts."])
def test_an_interrupt_leaves_nothing_behind(tmp_path, monkeypatch, kind, where):
    """In the dense part and among the experts; the conftest looks for open files, threads and changed classes."""
    model = write(tmp_path)
    scatter = Reader.scatter

    def failing(self, file, at, places, what):
        if where in what:
            raise kind("injected")
        return scatter(self, file, at, places, what)

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "scatter", failing)
        with pytest.raises(kind, match="injected"):
            apexk.load(tmp_path)
    loaded, handle = apexk.load(tmp_path)
    handle.restore()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_reader_that_is_closed_waits_for_reads_and_refuses_more(tmp_path, monkeypatch):
    """The library's threads may ask on after an interrupted loading: no file is opened again, none is closed under a read."""
    write(tmp_path)
    stored = next(iter(read_headers(tmp_path).values()))
    reader, reading, go_on, preadv, order = Reader(), threading.Event(), threading.Event(), os.preadv, []

    def slow(*args):
        reading.set()
        assert go_on.wait(60)
        order.append("read")
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor() as pool:
        got = pool.submit(reader.read, stored, 0, 1)
        assert reading.wait(60)
        closing = pool.submit(lambda: (reader.close(), order.append("closed")))
        time.sleep(0.05)
        go_on.set()
        assert got.result(60).shape[0] == 1
        closing.result(60)
    assert order == ["read", "closed"]
    with pytest.raises(ValueError, match="its loading has ended"):
        reader.read(stored, 0, 1)


def test_reads_that_come_in_parts(tmp_path, monkeypatch):
    """The system may give less than it is asked for, down to a byte, in the middle of any buffer."""
    model = write(tmp_path)
    preadv, draw = os.preadv, random.Random(0)

    def little(descriptor, buffers, offset):
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[: draw.choice((1, 7, 4096))]] if draw.random() < 0.5 else buffers[: draw.randint(1, 9)], offset)

    monkeypatch.setattr(os, "preadv", little)
    loaded, handle = apexk.load(tmp_path)
    handle.restore()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    write(tmp_path)
    from apexk.hf.loader import load as module

    def after_the_look(path, **options):
        found = module_inspect(path, **options)
        cut_off(tmp_path, None)
        return found

    module_inspect = module.inspect
    monkeypatch.setattr(module, "inspect", after_the_look)
    with pytest.raises(CheckpointError, match="cut off in .* while it was read"):
        apexk.load(tmp_path)


def test_a_folder_of_links_as_in_the_hubs_cache(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    write(snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    _, handle = apexk.load(snapshot, apexk.ApexConfig(device="cpu"))
    handle.restore()
