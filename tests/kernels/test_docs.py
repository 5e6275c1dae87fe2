"""The example of docs/write_a_kernel_case.md, run on the CPU with stand-ins for the kernel that it imagines."""

import sys
from pathlib import Path
from types import ModuleType

import torch

from apexk.kernels.bench import roofs, run
from apexk.kernels.triton import reference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "write_a_kernel_case.md"


def test_the_example_runs(monkeypatch):
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    kernel = ModuleType("apexk.kernels.triton.scale")
    kernel.scale = lambda x, factor, out: torch.mul(x, factor, out=out)
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    monkeypatch.setattr(reference, "scale_ref", lambda x, factor: x.double() * factor, raising=False)
    monkeypatch.setattr(roofs, "roof", lambda name: roofs.Roof(name, 10.0, "GB/s"))
    space = {"__package__": "apexk.kernels.bench", "__name__": "apexk.kernels.bench.cases_scale"}
    exec(compile(code.replace('"cuda"', '"cpu"'), str(PAGE), "exec"), space)
    cases = list(space["cases"]())
    assert [(c.provider, c.shape["tokens"]) for c in cases] == [(p, n) for n in (1, 64, 4096) for p in ("triton", "torch")]
    rows, wrong = run.measure(cases[:2], budget_s=0)
    assert wrong == [] and [row["provider"] for row in rows] == ["triton", "torch"] and "torch" in rows[0]["ratio_vs"]
    assert rows[0]["bytes"] == 2 * 2 * 4096
