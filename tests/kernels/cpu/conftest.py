"""Cases and comparisons that the CPU kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from apexk.kernels.cpu import library
from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.cpu.reference import grouped_ffn_ref

# (of the largest expected value, of the root mean square). A value on the edge between two roundings of the intermediate
# activation may fall either way: seen 2e-4 and 7e-5 over 500 cases. Rounding it another way everywhere would give a mean
# of 1e-3 in bf16. float32 has no such rounding.
TOLERANCE = {torch.bfloat16: (1e-3, 2e-4), torch.float16: (3e-4, 1e-4), torch.float32: (3e-6, 2e-6)}

# Those that the machine runs; test_native.py says which it does not, and runs them emulated.
ISAS = [pytest.param(name, marks=pytest.mark.isa(name)) for name, runs in library.isa_names().items() if runs]


@dataclass
class Case:
    """Random experts and routing; `out` starts as NaN so that an untouched row shows."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int = 6
    topk: int = 3
    dtype: torch.dtype = torch.bfloat16
    ids_dtype: torch.dtype = torch.int64
    seed: int = 0
    scale: float = 1.0  # of the gate and up rows
    biases: bool = False
    wanted: list[int] = field(default_factory=list)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        H, I, E = self.hidden, self.intermediate, self.experts
        w13 = self.scale * normal(E, 2 * I * H) / H**0.5
        w2 = normal(E, H * I) / I**0.5
        bias = [normal(E, 2 * I + H)] if self.biases else []
        self.weights = torch.cat([w13, w2, *bias], dim=1).to(self.dtype)
        self.blocks = torch.tensor([row.data_ptr() for row in self.weights], dtype=torch.int64)
        self.x = normal(self.tokens, H).to(self.dtype)
        choice = torch.rand(self.tokens, E, generator=generator).argsort(dim=1)[:, : self.topk]
        self.ids = choice.to(self.ids_dtype).contiguous()
        self.topk_weights = torch.rand(self.tokens, self.topk, generator=generator)
        self.wanted = self.wanted or list(range(E))
        self.out = torch.full((self.tokens * self.topk, H), torch.nan)

    def arguments(self) -> tuple:
        return self.x, self.blocks, self.ids, self.topk_weights, self.wanted, self.out

    def run(self, ffn: HostFFN, **options) -> torch.Tensor:
        self.out.fill_(torch.nan)
        ffn.run(*self.arguments(), intermediate=self.intermediate, biases=self.biases, **options)
        return self.out.clone()

    def expected(self, **options) -> torch.Tensor:
        out = torch.full_like(self.out, torch.nan, dtype=torch.float64)
        grouped_ffn_ref(*self.arguments()[:-1], out, intermediate=self.intermediate, biases=self.biases, **options)
        return out

    def check(self, got: torch.Tensor, **options) -> None:
        """`got` has the expected values, and the same NaN rows."""
        want = self.expected(**options)
        assert torch.equal(got.isnan(), want.isnan())
        if got.isnan().all():
            return
        error, want = (got.double() - want).nan_to_num(), want.nan_to_num()
        largest, mean = TOLERANCE[self.dtype]
        assert error.abs().max() <= largest * want.abs().max()
        assert error.norm() <= mean * want.norm()


@pytest.fixture
def case():
    return Case


@pytest.fixture(scope="session", params=ISAS)
def isa(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def ffn(isa: str):
    with HostFFN(threads=2, isa=isa, oversubscribe=True) as made:
        yield made
