"""The check that an installed package runs, and the benchmark's cases."""

import json

import pytest

from apexk.kernels.bench import busy_cpu, cases_cpu_ffn, check_cpu
from apexk.kernels.cpu import library
from apexk.kernels.triton.shapes import MoeShape


def test_check_finds_no_fault(capsys):
    assert check_cpu.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok") for line in lines) == 9 * sum(library.isa_names().values())


def test_check_reports_a_fault(capsys, monkeypatch):
    monkeypatch.setattr(check_cpu, "relative_error", lambda got, want: float("inf"))
    assert check_cpu.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("provider", ["cpu-", "torch-loop", "torch-grouped", "torch-fp32"])
def test_benchmark_case_is_right(monkeypatch, provider):
    monkeypatch.setattr(cases_cpu_ffn, "LAYERS", {"small": MoeShape(6, 2, 64, 32, 1)})
    case = next(c for c in cases_cpu_ffn.cases() if c.provider.startswith(provider) and c.shape["tokens"] == 16)
    call = case.make("cpu")
    call.run()
    assert call.error() <= case.allowed_error


def test_busy_machine_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases_cpu_ffn, "LAYERS", {"small": MoeShape(6, 2, 64, 32, 1)})
    path = tmp_path / "busy.json"
    assert busy_cpu.main(["--tokens", "4", "--others", "1", "--seconds", "0.05", "--json", str(path)]) == 0
    row = json.loads(path.read_text())
    assert row["ratio"] > 0 and row["due"] >= 1 and all(row[part]["calls"] >= 1 for part in ("before", "during", "after"))
    assert "1 busy processes" in capsys.readouterr().out
    assert busy_cpu.main(["--tokens", "3"]) == 2
