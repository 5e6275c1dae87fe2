"""The one registry of benchmark cases. A file `cases_<stem>.py` in this folder adds its own through `cases()`.

A case says what it is without building anything; `make` builds inputs on a device and returns a `Call`: something to
run, a comparison with the reference, and the operations and bytes that the *task* needs (the least possible, not what a
kernel happens to do), so that a percentage of a roof means the same for each provider.
"""

import fnmatch
import importlib
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Largest error against the reference, relative to the reference's largest value.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Call:
    run: Callable[[], object]  # one execution; allocates nothing it need not
    error: Callable[[], float]  # relative error of the last execution against the reference
    flops: int
    bytes: int


@dataclass(frozen=True)
class Case:
    op: str  # the stem: moe_ffn, routing, combine, host_ffn ...
    provider: str  # who computes: triton, torch, cpu-avx512 ...
    device: str  # cuda or cpu
    dtype: torch.dtype
    shape: dict = field(hash=False)  # model, tokens and whatever sizes it has
    make: Callable[[str], Call] = field(hash=False, repr=False)
    product: bool = False  # a matrix product: its compute roof is that of the dtype
    tolerance: float | None = None  # default: by dtype
    isa: str | None = None  # instruction set, where a case forces one

    @property
    def name(self) -> str:
        sizes = "/".join(str(v) for v in self.shape.values())
        return f"{self.op}/{self.provider}/{self.device}/{DTYPE_NAMES[self.dtype]}/{sizes}"

    @property
    def allowed_error(self) -> float:
        return TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance


def all_cases() -> list[Case]:
    """Cases of every file of this folder, in order of file name."""
    folder = Path(__file__).parent
    names = sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if m.name.startswith("cases_"))
    found: list[Case] = []
    for name in names:
        found += importlib.import_module(f"{__package__}.{name}").cases()
    repeated = {name for name, times in Counter(case.name for case in found).items() if times > 1}
    assert not repeated, f"cases of the same name: {sorted(repeated)}"
    return found


def select(cases: Iterable[Case], patterns) -> list[Case]:
    """The cases that are asked for; all where there is no pattern. A case's full name is that case alone, * and ? match as
    in file names, any other word matches anywhere. ValueError names the patterns that match nothing."""
    cases = list(cases)
    if not patterns:
        return cases
    names, chosen = [case.name for case in cases], set()
    for pattern in patterns:
        wild = pattern if pattern in names or any(c in pattern for c in "*?[") else f"*{pattern}*"
        found = {name for name in names if name == pattern} or {name for name in names if fnmatch.fnmatchcase(name, wild)}
        if not found:
            raise ValueError(f"no benchmark case matches {pattern!r}; --list shows them all")
        chosen |= found
    return [case for case in cases if case.name in chosen]


def relative_error(got, want) -> float:
    """Largest difference over the largest value; NaN counts as infinite."""
    got, want = got.double(), want.double().to(got.device)
    error = (got - want).abs().max() / want.abs().max().clamp(min=1e-30)
    return float("inf") if torch.isnan(error) else error.item()
