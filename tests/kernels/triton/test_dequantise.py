"""The kernel against payloads by hand: exact products in float64, odd sizes, NaN slots, bands around everything."""

import pytest
import torch

from apexk.kernels.triton.dequantise import dequantise
from apexk.kernels.triton.reference import dequantise_ref
from apexk.store.block import ExpertBlock
from apexk.store.quantised import BITS, Payload

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def drawn(n, k, bits, rng):
    """Codes of every value, the unused one and those behind k included, scales down to zero, and the weights in float64."""
    groups = -(-k // 64)
    most = 1 << (bits - 1)
    codes = torch.randint(-most, most, (n, groups, 64), generator=rng)
    scales = (torch.rand(n, groups, generator=rng) * 10.0 ** torch.randint(-7, 2, (n, groups), generator=rng)).half()
    want = (codes.double() * scales.double()[..., None]).reshape(n, -1)[:, :k]
    if bits == 4:
        codes = ((codes[..., :32] & 15) | (codes[..., 32:] << 4)).to(torch.int8)
    return codes.to(torch.int8).reshape(n, -1), scales, want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 64), (5, 40), (7, 100), (33, 65), (2, 1030)], ids=["smallest", "one_group", "less_than_a_half",
                         "two_groups", "more_than_a_program", "long_rows"])  # fmt: skip
def test_equals_the_rounded_exact_product(n, k, bits, dtype, guard, rng):
    codes, scales, want = drawn(n, k, bits, rng)
    out = guard(torch.full((n, k), float("nan"), dtype=dtype))
    dequantise(guard(codes), guard(scales), out, bits)
    assert torch.equal(out.cpu(), want.to(dtype))
    twin = torch.full((n, k), float("nan"), dtype=dtype)
    dequantise_ref(codes, scales, twin, bits)
    assert torch.equal(twin, want.to(dtype))


@pytest.mark.parametrize("name", BITS)
def test_a_slot_of_a_pool_gets_its_block_and_its_neighbours_nothing(name, guard, rng):
    """A whole payload with biases into the middle one of three slots, all NaN before."""
    block = ExpertBlock(72, 40, torch.bfloat16, biases=True)
    payload = Payload(block, name)
    source, packed = torch.zeros(block.stride, dtype=block.dtype), torch.zeros(payload.nbytes, dtype=torch.uint8)
    source[: block.elements] = torch.randn(block.elements, generator=rng).to(block.dtype)
    payload.pack(source, packed)
    want, pool = torch.zeros_like(source), guard(torch.full((3, block.stride), float("nan"), dtype=block.dtype))
    payload.unpack(packed, want)
    payload.unpack(guard(packed), pool[1], dequantise)
    assert torch.equal(pool[1, : block.elements].cpu(), want[: block.elements])
    assert pool[[0, 2]].isnan().all() and pool[1, block.elements :].isnan().all()


def test_refusals_and_nothing_to_do(device):
    codes, scales = torch.zeros(2, 64, dtype=torch.int8, device=device), torch.zeros(2, 1, dtype=torch.float16, device=device)
    out = torch.zeros(2, 60, device=device)
    with pytest.raises(ValueError, match="bits: got 2, wanted one of 8, 4"):
        dequantise(codes, scales, out, 2)
    with pytest.raises(ValueError, match=r"codes: got shape \[2, 64\], wanted \[2, 32\]"):
        dequantise(codes, scales, out, 4)
    with pytest.raises(ValueError, match=r"scales: got shape \[2, 1\], wanted \[2, 2\]"):
        dequantise(codes, scales, torch.zeros(2, 65, device=device), 8)
    with pytest.raises(TypeError, match="scales: got torch.float32"):
        dequantise(codes, scales.float(), out, 8)
    dequantise(codes[:0], scales[:0], out[:0], 8)
