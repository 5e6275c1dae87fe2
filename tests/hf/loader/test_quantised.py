"""FP8 and MXFP4 checkpoints against the library's own dequantisation and against the formats' definitions in float64."""

import pytest
import torch
from checkpoints import change_config, rewrite, tensors_of, write
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import apexk
from apexk.hf.loader.codec import Tensor, dequantize_fp8, dequantize_mxfp4
from apexk.hf.loader.headers import CheckpointError, Stored

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def quantize(weights, block):
    """`[.., R, C]` -> float8 and a scale a block, as DeepSeek's tools write them."""
    rows, columns = weights.shape[-2:]
    r, c = -(-rows // block[0]), -(-columns // block[1])
    scales = 0.5 + torch.rand(*weights.shape[:-2], r, c)
    row, column = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    return (weights.float() / scales[..., row, :][..., column]).to(torch.float8_e4m3fn), scales


def defined_fp8(weights, scales, block, dtype):
    """Block by block, in float64."""
    wanted = weights.to(torch.float64)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            place = (..., slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            wanted[place] *= scales[..., i : i + 1, j : j + 1].double()
    return wanted.to(torch.float32).to(dtype)  # a float8 times a float32 rounds once to float32, then once to the dtype


@pytest.mark.parametrize("rows", [(0, 12), (12, 24), (24, 30), (0, 30), (5, 6)], ids=str)
def test_rows_of_an_fp8_matrix_take_their_own_blocks_scales(rows):
    """As a flat `[E*I, H]` matrix of experts is read, whose share of rows begins inside a block."""
    stored = quantize(torch.randn(30, 20), (8, 16))
    parts = tuple(Stored("t", None, t.dtype, tuple(t.shape), 0, t.nbytes) for t in stored)
    read = dict(zip(map(id, parts), stored, strict=True))
    tensor = Tensor("t", (30, 20), parts, "fp8", (8, 16))
    found = tensor.values(lambda part, begin, end: read[id(part)][begin:end], torch.float32, rows)
    assert torch.equal(found, defined_fp8(*stored, (8, 16), torch.float32)[slice(*rows)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "block"), [((32, 64), (16, 16)), ((20, 24), (16, 16)), ((3, 12, 40), (8, 32)), ((1, 5), (128, 128))], ids=str)
def test_fp8_is_the_stored_value_times_its_blocks_scale(shape, block, dtype):
    weights, scales = quantize(torch.randn(shape), block)
    found = dequantize_fp8(weights, scales, block, dtype)
    assert torch.equal(found, defined_fp8(weights, scales, block, dtype))
    if not shape[-2] % block[0] and not shape[-1] % block[1]:  # the library takes whole blocks only
        assert torch.equal(found, Fp8Dequantize(None)._dequantize_one(weights, scales, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4_is_the_librarys_and_the_formats(dtype):
    """Every byte, under exponents that neither dtype loses."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 2, 8, 16)
    scales = torch.randint(113, 140, (1, 2, 8), dtype=torch.uint8)
    found = dequantize_mxfp4(blocks, scales, dtype)
    assert torch.equal(found.transpose(1, 2), convert_moe_packed_tensors(blocks, scales, dtype=dtype))
    magnitude = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(2):
        for column in range(256):
            byte = int(blocks[0, row, column // 32, column % 32 // 2])
            nibble = byte >> 4 if column % 2 else byte & 15
            value = magnitude[nibble & 7] * (-1 if nibble & 8 else 1) * 2.0 ** (int(scales[0, row, column // 32]) - 127)
            assert float(found[0, row, column]) == value


@pytest.mark.parametrize("block", [(16, 16), (24, 40)], ids=str)
@pytest.mark.parametrize(("model_type", "original"), [("deepseek_v3", True), ("qwen3_moe", True), ("qwen3_moe", False), ("mixtral", True)])
def test_an_fp8_checkpoint(tmp_path, model_type, original, block):
    """Attention, dense layers and experts in FP8, norms, router and embeddings not: as such models are released."""
    model = write(tmp_path, model_type, original)
    stored, wanted = {}, {}
    for name, tensor in tensors_of(tmp_path).items():
        if tensor.ndim < 2 or any(part in name for part in ("embed", "lm_head", "gate.weight", "norm")):
            stored[name] = wanted[name] = tensor
            continue
        weights, scales = quantize(tensor, block)
        stored |= {name: weights, f"{name}_scale_inv": scales}
        wanted[name] = defined_fp8(weights, scales, block, torch.bfloat16)
    assert sum(t.dtype == torch.float8_e4m3fn for t in stored.values()) > 8
    rewrite(tmp_path, wanted)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    rewrite(tmp_path, stored, shards=3)
    change_config(tmp_path, quantization_config=FP8 | {"weight_block_size": list(block)})
    loaded, handle = apexk.load(tmp_path)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert getattr(loaded.config, "quantization_config", None) is None and type(loaded) is type(model)
    handle.restore()


def test_an_mxfp4_checkpoint(tmp_path):
    """gpt-oss as it is released, against the library's loading of it."""
    write(tmp_path / "full", "gpt_oss", hidden_size=96, intermediate_size=64)
    tensors = {}
    for name, tensor in tensors_of(tmp_path / "full").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 128, (experts, rows, columns // 32), dtype=torch.uint8)
        else:
            tensors[name] = tensor
    rewrite(tmp_path / "full", tensors)
    change_config(tmp_path / "full", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "full", quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    model, handle = apexk.load(tmp_path / "full", apexk.ApexConfig(pool=2))
    wanted, state = plain.state_dict(), model.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], value) for name, value in wanted.items())
    handle.restore()
    with torch.no_grad():
        assert torch.equal(model(torch.arange(9)[None]).logits, plain(torch.arange(9)[None]).logits)


def drop_scales(tensors):
    return {name: t for name, t in tensors.items() if not name.endswith("experts.3.up_proj.weight_scale_inv")}


def spoil_scales(value):
    def change(tensors):
        name = next(n for n in tensors if n.endswith("experts.3.up_proj.weight_scale_inv"))
        tensors[name].view(-1)[-1] = value
        return tensors

    return change


def cut_scales(tensors):
    return {name: t[:, :-1].contiguous() if name.endswith("experts.3.up_proj.weight_scale_inv") else t for name, t in tensors.items()}


@pytest.mark.parametrize(("change", "config", "said"), [
    (drop_scales, FP8 | {"weight_block_size": [16, 16]}, "scales .*experts.3.up_proj.weight_scale_inv are missing"),
    (cut_scales, FP8 | {"weight_block_size": [16, 16]}, r"experts.3.up_proj.weight_scale_inv has shape \[2, 3\].*wants \[2, 4\]"),
    (dict, FP8 | {"weight_block_size": [16, 32]}, "weight_scale_inv has shape"),
    (spoil_scales(float("nan")), FP8 | {"weight_block_size": [16, 16]}, "up_proj.weight_scale_inv in model.safetensors holds scales that are not finite"),
    (spoil_scales(float("inf")), FP8 | {"weight_block_size": [16, 16]}, "scales that are not finite"),
    (dict, FP8, "weight_block_size .*got None"),
    (dict, None, "quantization_config does not say 'fp8'"),
])  # fmt: skip
def test_fp8_with_scales_that_do_not_fit(tmp_path, change, config, said):
    write(tmp_path)
    stored = {}
    for name, tensor in tensors_of(tmp_path).items():
        if ".experts." in name:
            weights, scales = quantize(tensor, (16, 16))
            stored |= {name: weights, f"{name}_scale_inv": scales}
        else:
            stored[name] = tensor
    rewrite(tmp_path, change(stored))
    change_config(tmp_path, **({"quantization_config": config} if config else {}))
    with pytest.raises(CheckpointError, match=said):
        apexk.load(tmp_path)


def test_an_mxfp4_exponent_that_is_none(tmp_path):
    write(tmp_path, "gpt_oss")
    tensors = tensors_of(tmp_path)
    name = next(n for n in tensors if n.endswith("down_proj"))
    experts, inner, hidden = tensors.pop(name).shape
    scales = torch.full((experts, hidden, inner // 32), 127, dtype=torch.uint8)
    scales[-1, -1, -1] = 255
    rewrite(tmp_path, tensors | {f"{name}_blocks": torch.zeros(experts, hidden, inner // 32, 16, dtype=torch.uint8), f"{name}_scales": scales})
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=f"{name}_scales in model.safetensors holds scales that are not finite"):
        apexk.load(tmp_path)


def test_mxfp4_of_another_shape(tmp_path):
    write(tmp_path, "gpt_oss")
    tensors = tensors_of(tmp_path)
    name = next(n for n in tensors if n.endswith("gate_up_proj"))
    del tensors[name]
    rewrite(tmp_path, tensors | {f"{name}_blocks": torch.zeros(8, 64, 2, 8, dtype=torch.uint8), f"{name}_scales": torch.zeros(8, 64, 2, dtype=torch.uint8)})
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=f"{name}_blocks.*wanted bytes"):
        apexk.load(tmp_path)
