"""Payloads: every code and scale by the definition, weight by weight in float64, and what comes back within its bound."""

import numpy as np
import pytest
import torch

from apexk.store.block import ExpertBlock
from apexk.store.quantised import BITS, Payload, half_precision_ratio, quantise

SHAPES = [(64, 128), (40, 24), (100, 65), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def filled(block: ExpertBlock, rng: np.random.Generator) -> torch.Tensor:
    """A block whose rows differ by orders of magnitude; the gap behind it is NaN."""
    values = torch.full((block.stride,), float("nan"), dtype=block.dtype)
    for part, shape in block.shapes.items():
        drawn = rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 2, (shape[0],) + (1,) * (len(shape) - 1))
        block.view(part, values[None])[0].copy_(torch.from_numpy(drawn))
    return values


def by_definition(row: np.ndarray, bits: int) -> tuple[list[int], np.ndarray]:
    """Codes and scales of one row, by loops."""
    most, codes, scales = 2 ** (bits - 1) - 1, [], []
    for start in range(0, len(row), 64):
        group = row[start : start + 64].astype(np.float32)
        scale = np.float16(np.float32(np.abs(group).max()) / np.float32(most))
        scales.append(scale)
        codes += [int(np.clip(np.rint(w / np.float32(scale)), -most, most)) if scale else 0 for w in group]
        codes += [0] * (64 - len(group))
    return codes, np.array(scales)


def bytes_of(codes: list[int], bits: int) -> list[int]:
    if bits == 8:
        return codes
    packed = []
    for start in range(0, len(codes), 64):
        packed += [(codes[start + j] & 15) + 16 * codes[start + j + 32] for j in range(32)]
    return packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize(("hidden", "inter"), SHAPES)
def test_every_byte_is_by_the_definition_and_comes_back(hidden, inter, name, dtype):
    block = ExpertBlock(hidden, inter, dtype, biases=True)
    payload, bits = Payload(block, name), BITS[name]
    rng = np.random.default_rng(hidden)
    source = filled(block, rng)
    packed = torch.full((payload.stride_bytes,), 171, dtype=torch.uint8)
    payload.pack(source, packed)
    assert (packed[payload.nbytes :] == 171).all()
    back = torch.full_like(source, float("nan"))
    payload.unpack(packed, back)
    assert torch.equal(back[block.elements :].isnan(), torch.ones(block.stride - block.elements, dtype=torch.bool))
    for part in ("w13", "w2"):
        weights, got = (block.view(part, b[None])[0].double().numpy() for b in (source, back))
        codes, scales = payload.view(f"{part}.codes", packed).numpy(), payload.view(f"{part}.scales", packed).numpy()
        for r, row in enumerate(weights):
            want, want_scales = by_definition(row, bits)
            assert codes[r].tolist() == bytes_of(want, bits) and np.array_equal(scales[r], want_scales)
            scale = want_scales.astype(np.float64).repeat(64)[: len(row)]
            exact = np.array(want[: len(row)]) * scale
            assert torch.equal(torch.from_numpy(exact).to(dtype), block.view(part, back[None])[0][r]), "one rounding, of the exact product"
            most = 2 ** (bits - 1) - 1
            bound = scale / 2 + most * np.maximum(scale / 2**11, 2.0**-25)
            assert (np.abs(exact - row) <= bound * (1 + 1e-6)).all()
    for part in ("b13", "b2"):
        assert torch.equal(block.view(part, back[None]), block.view(part, source[None])), "biases travel as they are"


@pytest.mark.parametrize(("name", "ratio"), [("int8", (1 + 2 / 64) / 2), ("int4", (1 / 2 + 2 / 64) / 2)])
def test_sizes_and_places(name, ratio):
    """bf16, a model's shape: a byte or half a byte a weight and two bytes a group; parts aligned and disjoint."""
    payload = Payload(ExpertBlock(2048, 512, torch.bfloat16), name)
    assert payload.ratio == pytest.approx(ratio, abs=1e-12) and half_precision_ratio(name) == ratio
    odd = Payload(ExpertBlock(100, 65, torch.float32, biases=True), name)
    end = 0
    for start, shape, dtype in odd.parts.values():
        assert start % 16 == 0 and start >= end
        end = start + int(np.prod(shape)) * dtype.itemsize
    assert odd.nbytes == end <= odd.stride_bytes and odd.stride_bytes % 4096 == 0


def test_zero_groups_and_the_whole_range():
    weights = torch.zeros(3, 130)
    weights[1, 64:128] = torch.linspace(-2.0**15, 2.0**15, 64)
    weights[2, 129] = 1e-9  # its scale is zero in fp16
    for bits in BITS.values():
        codes, scales = quantise(weights, bits)
        assert scales.isfinite().all() and not scales[0].any() and not scales[2].any() and not codes[0].any() and not codes[2].any()
        assert bool(codes[1].any())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -40000.0])
def test_what_cannot_be_held_is_refused(bad):
    weights = torch.ones(2, 70)
    weights[1, 69] = bad
    with pytest.raises(ValueError, match="w2: a weight is not finite or above 32768"):
        quantise(weights, 8, "w2")
    with pytest.raises(ValueError, match="payload is 'int2'; there are int8, int4"):
        Payload(ExpertBlock(8, 8, torch.float32), "int2")
