"""The check that an installed package runs, and the benchmark's cases."""

import json
import os

import pytest
import torch

from apexk.cli import main
from apexk.kernels.bench import busy_cpu, cases_cpu_ffn, cases_cpu_linear, check_cpu, run
from apexk.kernels.bench.against import competitors
from apexk.kernels.bench.registry import select
from apexk.kernels.cpu import library
from apexk.kernels.triton.shapes import MoeShape


def test_check_finds_no_fault(capsys):
    assert check_cpu.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("ok") for line in lines) == 2 * 9 * sum(library.isa_names().values())


def test_check_reports_a_fault(capsys, monkeypatch):
    monkeypatch.setattr(check_cpu, "relative_error", lambda got, want: float("inf"))
    assert check_cpu.main([]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", cases_cpu_ffn.DTYPES, ids=str)
@pytest.mark.parametrize("provider", ["cpu-", "torch-loop", "torch-grouped", "torch-fp32"])
def test_benchmark_case_is_right(monkeypatch, provider, dtype):
    monkeypatch.setattr(cases_cpu_ffn, "LAYERS", {"small": MoeShape(6, 2, 64, 32, 1)})
    case = next(c for c in cases_cpu_ffn.cases() if c.provider.startswith(provider) and c.dtype == dtype and c.shape["tokens"] == 16)
    call = case.make("cpu")
    assert call.bytes > 6 * 3 * 64 * 32 * dtype.itemsize, "all experts are read, in this dtype"
    call.run()
    assert call.error() <= case.allowed_error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("provider", ["cpu-", "torch"])
def test_linear_benchmark_case_is_right(monkeypatch, provider, dtype):
    monkeypatch.setattr(cases_cpu_linear, "ALL_COPIES", 4 * 65 * 100 * 2)
    case = next(c for c in cases_cpu_linear.cases() if c.provider.startswith(provider) and c.dtype == dtype and (c.shape["layer"], c.shape["tokens"]) == ("odd", 16))
    call = case.make("cpu")
    assert (call.flops, call.bytes) == (2 * 16 * 65 * 100, 2 * (65 * 100 + 16 * 165))
    for _ in range(5):
        call.run()
    assert call.error() <= case.allowed_error


@pytest.mark.parametrize("layer", cases_cpu_ffn.LAYERS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_layer_has_every_dtype_and_routing_beside_every_peer(layer, dtype):
    found = select(cases_cpu_ffn.cases(), [f"cpu_ffn/*/{dtype}/{layer}/*"])
    peers = {"torch-loop", "torch-grouped-mm", "torch-fp32"}
    assert {c.shape["tokens"] for c in found} == {1, 2, 4, 8, 16, 64, 256, 1024, 4096}
    for group in competitors(found):
        assert peers < {c.provider for c in group}
    assert {c.shape["routing"] for c in found} == {"uniform", "zipf"} and 1 in {c.shape["threads"] for c in found}


def test_the_usual_cases_are_qwen3_in_bf16(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "main", lambda rest: asked.append(rest) or 0)
    assert main(["kernels", "cpu", "--bench", "--tokens", "1"]) == 0 and asked[0][1:] == ["--tokens", "1"]
    found = select(cases_cpu_ffn.cases(), asked[0][:1])
    assert {(c.dtype, c.shape["layer"]) for c in found} == {(torch.bfloat16, "qwen3-64")}
    assert {c.shape["routing"] for c in found} == {"uniform", "zipf"}


def test_busy_processes_share_the_processors_thread_by_thread():
    """Which sessions of their own need not: the ratio that is due would be another."""
    with busy_cpu.busy_processes(2) as running:
        assert {os.getsid(process.pid) for process in running} == {os.getsid(0)}
        while os.getpgid(0) in {os.getpgid(process.pid) for process in running}:  # until both have a group of their own: Ctrl-C
            assert all(process.poll() is None for process in running)


@pytest.mark.parametrize("flag", ["--seconds=0", "--seconds=-1", "--seconds=nan", "--seconds=inf", "--others=0", "--others=-1"])
def test_a_busy_machine_of_nothing_is_refused(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        busy_cpu.main([flag])
    assert ended.value.code == 2 and "; wanted a " in capsys.readouterr().err


def test_busy_machine_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases_cpu_ffn, "LAYERS", {"small": MoeShape(6, 2, 64, 32, 1)})
    path = tmp_path / "busy.json"
    assert busy_cpu.main(["--tokens", "4", "--others", "1", "--seconds", "0.05", "--json", str(path)]) == 0
    row = json.loads(path.read_text())
    assert row["ratio"] > 0 and row["due"] >= 1 and all(row[part]["calls"] >= 1 for part in ("before", "during", "after"))
    assert "1 busy processes" in capsys.readouterr().out
    assert busy_cpu.main(["--tokens", "3"]) == 2
