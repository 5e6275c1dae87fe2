"""The benchmark runner: what it refuses, what a row holds, and that nothing wrong is ever timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from apexk.kernels.bench import registry, roofs, run
from apexk.kernels.bench.registry import Call, Case, all_cases, relative_error, select
from apexk.kernels.bench.timing import host_times_ns, quantiles


@pytest.fixture(autouse=True)
def small_roofs(monkeypatch):
    monkeypatch.setattr(roofs, "HOST_BYTES", 1 << 20)
    monkeypatch.setitem(roofs.MEASURES, "host_fp32", lambda: (1000, "GFLOP/s", "cpu", lambda: None))
    measured = roofs.roof
    measured.cache_clear()
    yield
    measured.cache_clear()


def case(op="double", error=0.0, device="cpu", **options):
    def make(device):
        x, calls = torch.ones(1000), []
        call = Call(lambda: calls.append(x * 2), lambda: error, 1000, 8000)
        call.calls = calls
        made.append(call)
        return call

    made = []
    built = Case(op, "torch", device, torch.float32, {"tokens": 3}, make, **options)
    return built, made


def with_cases(monkeypatch, *cases):
    monkeypatch.setattr(run, "all_cases", lambda: list(cases))


def test_the_registry_serves_every_file_and_names_are_unique():
    cases = all_cases()
    ops = {c.op for c in cases}
    assert {"moe_ffn", "moe_layer", "routing", "ranking", "permute", "unpermute", "combine", "gated_gemm", "grouped_gemm"} <= ops
    assert len({c.name for c in cases}) == len(cases)
    assert any(c.device == "cpu" for c in cases) and any(c.device == "cuda" for c in cases)


@pytest.mark.parametrize("kept", [[], ["--json"], ["--jsonl"]], ids=str)
def test_a_run_that_nobody_reads_ends_at_the_next_case(kept, monkeypatch, tmp_path):
    """Unless its rows are to be written into a file."""
    from apexk import cli

    cases = [case(f"op{i}") for i in range(3)]
    with_cases(monkeypatch, *(built for built, _ in cases))
    reader, writer = os.pipe()
    os.close(reader)
    out = [str(tmp_path / "rows")] if kept else []
    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert cli.main(["kernels", "bench", "--budget", "0", *kept, *out]) == cli.DONE
    assert [len(made) for _, made in cases] == ([1, 1, 1] if kept else [1, 0, 0])


def test_a_case_is_compared_with_limits_of_its_own_turns(monkeypatch):
    """Not with those of another moment; the machine here gets slower once the run has begun."""
    looks = {"host_read": [], "host_fp32": []}
    for name in looks:
        monkeypatch.setitem(roofs.MEASURES, name, lambda name=name: (10**6, "GB/s", "cpu", lambda: looks[name].append(torch.get_num_threads())))
    usual = torch.get_num_threads()
    one, made = case(product=True)
    one.shape["threads"] = 1
    (row,), wrong = run.measure([one], budget_s=0.0)
    assert not wrong and len(made[0].calls) >= 5 and torch.get_num_threads() == usual
    assert all(len(threads) >= 5 and set(threads) == {1} for threads in looks.values())
    assert row["roof"] in ("host_read x1", "host_fp32 x1") and row["roof_value"] > 0


def test_select():
    cases = all_cases()
    assert {c.op for c in select(cases, ["combine"])} == {"combine"}
    assert [c.name for c in select(cases, ["moe_ffn/*/cpu/*/1"])] == ["moe_ffn/torch-loop/cpu/fp32/tiny/1"]
    assert [c.name for c in select(cases, ["moe_ffn/torch-loop/cpu/fp32/tiny/1"])] == ["moe_ffn/torch-loop/cpu/fp32/tiny/1"]
    assert select(cases, []) == cases
    with pytest.raises(ValueError, match="nothing-like-it"):
        select(cases, ["combine", "nothing-like-it"])


def test_a_row_holds_what_is_needed_to_repeat_it(monkeypatch, tmp_path, capsys):
    with_cases(monkeypatch, case()[0])
    path = tmp_path / "rows.jsonl"
    assert run.main(["--budget", "0.01", "--jsonl", str(path)]) == run.DONE
    *roof_rows, row = [json.loads(line) for line in path.read_text().splitlines()]
    assert {r["name"] for r in roof_rows} == {"roof/host_read", "roof/host_fp32"}
    assert row["schema"] == "apexk.bench/1" and row["op"] == "double" and row["provider"] == "torch"
    assert row["p20_ns"] <= row["p50_ns"] <= row["p80_ns"]
    assert row["flops"] == 1000 and row["bytes"] == 8000 and row["shape"] == {"tokens": 3} and row["error"] == 0
    assert row["roof"] == "host_read" and row["percent_of_roof"] == pytest.approx(
        100 * 8000 / row["roof_value"] / row["p50_ns"]
    )
    for key in ("device", "clocks_mhz", "commit", "dirty", "versions", "cpus"):
        assert key in row
    assert row["command"] == "apexk kernels bench double/torch/cpu/fp32/3"
    assert "% of host_read" in capsys.readouterr().out


def test_rows_become_a_table(monkeypatch, tmp_path, capsys):
    """The newest row of a name counts; roofs stand above the operations."""
    with_cases(monkeypatch, case()[0], case("triple")[0])
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        run.main(["--budget", "0.01", "--jsonl", str(path)])
    capsys.readouterr()
    assert run.main(["--table", str(path)]) == run.DONE
    text = capsys.readouterr().out
    assert text.index("| host_read |") < text.index("### double") < text.index("### triple")
    assert text.count("| tokens=3 | fp32 | torch |") == 2 and "Commit " in text


def test_the_roof_is_the_one_that_binds(monkeypatch):
    fixed = {"host_read": roofs.Roof("host_read", 10.0, "GB/s"), "host_fp32": roofs.Roof("host_fp32", 100.0, "GFLOP/s")}
    monkeypatch.setattr(roofs, "roof", fixed.__getitem__)
    assert roofs.bound_by("cpu", torch.float32, 1000, 1000, True) == (fixed["host_read"], 100)
    assert roofs.bound_by("cpu", torch.float32, 100_000, 1000, True) == (fixed["host_fp32"], 1000)
    assert roofs.bound_by("cpu", torch.float32, 100_000, 1000, False) == (fixed["host_read"], 100)


@pytest.mark.parametrize("error", [0.1, float("nan"), float("inf")])
def test_a_wrong_result_is_never_timed(error, monkeypatch, capsys, tmp_path):
    wrong, made = case(error=error)
    with_cases(monkeypatch, wrong)
    assert run.main(["--jsonl", str(tmp_path / "rows")]) == run.FAILED
    assert len(made[0].calls) == 1, "it ran for the check and no more"
    assert "against the reference, allowed 1e-05" in capsys.readouterr().out
    assert "double" not in (tmp_path / "rows").read_text()


def test_no_check_when_told(monkeypatch):
    with_cases(monkeypatch, case(error=1.0)[0])
    assert run.main(["--no-check", "--budget", "0.01"]) == run.DONE


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_gpu_cases_say_that_they_need_one(monkeypatch, capsys):
    with_cases(monkeypatch, case(device="cuda")[0])
    assert run.main([]) == run.LACKING
    assert "1 of 1 cases need a CUDA device" in capsys.readouterr().err


def test_misuse(monkeypatch, capsys):
    assert run.main(["no-such-case"]) == run.MISUSE
    assert "--list shows them all" in capsys.readouterr().err
    with_cases(monkeypatch, case()[0])
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert run.main([]) == run.MISUSE
    assert "--under-profiler" in capsys.readouterr().err


def test_real_cpu_case_passes_its_own_check():
    chosen = select(all_cases(), ["moe_ffn/*/cpu/*/16"])[0]
    (row,), wrong = run.measure([chosen], budget_s=0.01)
    assert not wrong and row["error"] < 1e-5


def test_quantiles_and_repetitions():
    assert quantiles([5.0]) == {"p20_ns": 5.0, "p50_ns": 5.0, "p80_ns": 5.0}
    assert quantiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == {"p20_ns": 2.0, "p50_ns": 3.5, "p80_ns": 5.0}
    assert [len(times) for times in host_times_ns([lambda: None], 0.0)] == [5]


def test_relative_error():
    assert relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.2])) == pytest.approx(0.2 / 2.2)
    assert relative_error(torch.tensor([float("nan")]), torch.ones(1)) == float("inf")


def test_unknown_roof():
    with pytest.raises(ValueError, match="roof 'warp' is not known; known: host_read"):
        roofs.roof("warp")


def test_registry_refuses_two_cases_of_one_name(monkeypatch):
    class Twice:
        @staticmethod
        def cases():
            return [case()[0], case()[0]]

    monkeypatch.setattr(registry.importlib, "import_module", lambda name: Twice)
    monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda paths: [type("M", (), {"name": "cases_x"})])
    with pytest.raises(AssertionError, match="cases of the same name"):
        registry.all_cases()


@pytest.mark.slow
def test_check_command_passes_without_the_suites_repairs():
    """In a process of its own: a user's machine has no tests/triton_interpreter.py."""
    pytest.importorskip("triton")
    program = "import sys; from apexk.kernels.bench.check import main; sys.exit(main([]))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "moe_ffn" in done.stdout and done.stdout.endswith("0 failures\n")
