"""MoE layers for checks of correctness, in which everything that must not be read is NaN: slots without an expert, the gaps
between blocks, and guard bands around every tensor. The bands are compared afterwards, since nothing else would show a
stray store."""

from dataclasses import dataclass

import torch

# Largest error against float64, relative to the largest value of the row.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BAND = 64


class Guard:
    """Call it on a tensor for a copy on the device between two bands; `compare` looks whether they are as they were."""

    def __init__(self, device):
        self.device, self.bands = device, []

    def __call__(self, tensor):
        fill = float("nan") if tensor.is_floating_point() else 77
        flat = torch.full((tensor.numel() + 2 * BAND,), fill, dtype=tensor.dtype, device=self.device)
        inside = flat[BAND : BAND + tensor.numel()].view(tensor.shape)
        inside.copy_(tensor)
        self.bands.append((flat, flat[:BAND].clone(), flat[-BAND:].clone()))
        return inside

    def compare(self):
        for flat, before, after in self.bands:
            assert torch.equal(flat[:BAND].nan_to_num(7), before.nan_to_num(7)), "a store went in front of a tensor"
            assert torch.equal(flat[-BAND:].nan_to_num(7), after.nan_to_num(7)), "a store went past a tensor"


@dataclass
class Layer:
    """A MoE layer's inputs on the device; weights are views of a pool whose other parts are NaN."""

    x: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    slot_of: torch.Tensor

    @property
    def topk(self):
        return self.ids.shape[1]

    def fresh_out(self):
        return torch.full((self.ids.numel(), self.x.shape[1]), float("nan"), device=self.x.device)


def build_layer(guard, rng, ids=None, *, T=7, topk=3, H=64, I=48, experts=10, slots=6, resident=4, dtype=torch.float32,
                slot_of=None) -> Layer:  # fmt: skip
    """`slots` slots, `resident` of `experts` experts in shuffled ones, choices `ids` or drawn from `rng`."""
    if ids is None:
        ids = torch.stack([torch.randperm(experts, generator=rng)[:topk] for _ in range(T)]) if T else torch.empty(0, topk).long()
    if slot_of is None:
        slot_of = torch.full((experts,), -1, dtype=torch.int32)
        places = torch.randperm(slots, generator=rng)[:resident]
        slot_of[torch.randperm(experts, generator=rng)[:resident]] = places.int()
    stride = -(-3 * H * I // 128) * 128 + 128  # a gap behind each block
    pool = torch.full((slots, stride), float("nan"))
    for slot in slot_of[slot_of >= 0].tolist():
        pool[slot, : 2 * I * H] = torch.randn(2 * I * H, generator=rng) / H**0.5
        pool[slot, 2 * I * H : 3 * I * H] = torch.randn(I * H, generator=rng) / I**0.5
    pool = guard(pool.to(dtype))
    return Layer(
        guard(torch.randn(ids.shape[0], H, generator=rng).to(dtype)),
        pool.as_strided((slots, 2 * I, H), (stride, H, 1), pool.storage_offset()),
        pool.as_strided((slots, H, I), (stride, I, 1), pool.storage_offset() + 2 * I * H),
        guard(ids), guard(torch.rand(ids.shape, generator=rng)), guard(slot_of),
    )  # fmt: skip


def compare(got, want, dtype) -> float:
    """Largest error against a float64 reference, within the dtype's tolerance; NaN must stand in the same places."""
    got, want = got.double().cpu(), want.double().cpu()
    assert torch.equal(got.isnan(), want.isnan()), "other rows were written than those of the reference"
    if not want.numel():
        return 0.0
    scale = want.nan_to_num().abs().amax(-1, keepdim=True).clamp(min=1e-3)
    error = ((got - want).nan_to_num().abs() / scale).max().item()
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}, allowed {TOLERANCE[dtype]:.0e}"
    return error
