"""The suite on a machine without a GPU: kernel pieces run virtually, the rest is told apart from failures."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from apexk import policy
from apexk.kernels.bench import matrix
from profiling.gpu_suite import __main__ as suite_main
from profiling.gpu_suite import part_e2e, part_kernels, pieces
from profiling.gpu_suite import report as report_of_a_run
from profiling.gpu_suite.pieces import Context, Piece, Skip, run

ROOT = Path(__file__).resolve().parents[2]


def suite(*arguments):
    command = [sys.executable, "-m", "profiling.gpu_suite", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_virtual_kernels(tmp_path):
    out = tmp_path / "suite.json"
    done = suite("--part", "kernels", "--virtual", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["schema"] == "apexk.gpu-suite/1" and report["virtual"]
    status = {r["name"]: r["status"] for r in report["results"]}
    assert status == dict.fromkeys(("grouped_ffn", "combine_rows", "host_ffn"), "ok") | {"timings": "skipped"}
    assert report["environment"]["packages"]["torch"]
    cover = report["results"][0]["numbers"]
    assert cover["cases"] == part_kernels.VIRTUAL_CASES and cover["left out for time"] == 0
    table = out.with_suffix(".md").read_text()
    assert "| kernels/grouped_ffn | ok |" in table and f"results: {out} and suite.md" in done.stdout
    assert not list(report_of_a_run.RESULTS.glob("*no-gpu*")), "nothing is kept of a run without a GPU"


def test_no_time_left_is_said_and_no_failure(monkeypatch):
    monkeypatch.setattr(part_kernels, "_ready", lambda context: None)
    left = iter([100.0, 60.0, 49.0])  # half of the time is the matrix's
    monkeypatch.setattr(Context, "seconds_left", lambda self: next(left))
    monkeypatch.setattr(matrix, "check", lambda case, device: 1e-7)
    numbers = part_kernels.grouped_ffn(Context(True, "cpu", "a6000-paper"))
    assert numbers["cases"] == 1 and numbers["left out for time"] == part_kernels.VIRTUAL_CASES - 1


def test_a_case_that_differs_is_named(monkeypatch):
    def check(case, device):
        assert case is not matrix.CASES[3], "relative error 1.0e+00"
        return 1e-7

    monkeypatch.setattr(part_kernels, "_ready", lambda context: None)
    monkeypatch.setattr(matrix, "check", check)
    with pytest.raises(AssertionError, match=f"1 of {part_kernels.VIRTUAL_CASES} cases: {matrix.name(matrix.CASES[3])}: relative error"):
        part_kernels.grouped_ffn(Context(True, "cpu", "a6000-paper"))


def test_results_are_kept_by_date_gpu_and_part(tmp_path):
    day = datetime.date(2030, 1, 2)
    path = report_of_a_run.default_path("NVIDIA RTX A6000", "kernels", day)
    assert path == ROOT / "profiling" / "results" / "2030-01-02-nvidia-rtx-a6000-kernels.json"
    row = {"name": "ffn/triton/cuda/bf16/1", "device": "a GPU", "op": "ffn", "provider": "triton", "dtype": "bf16", "shape": {"tokens": 1},
           "p20_ns": 1e3, "p50_ns": 2e3, "p80_ns": 3e3, "percent_of_roof": 50.0, "roof": "device_read", "ratio_vs": {"torch-loop": 2.5},
           "commit": "abc", "dirty": False, "versions": {}}  # fmt: skip
    made = run(Piece("kernels", "timings", lambda _: {"cases": 1, "rows": [row]}), Context(False, "cuda", "a6000-paper"))
    assert made["numbers"] == {"cases": 1} and made["rows"] == [row]
    about = {"gpu": {"name": "a GPU"}, "cpu": "a CPU", "packages": {"torch": "2", "nvtx": None}, "commit": "abc", "dirty": True}
    report = {"command": "make", "environment": about, "results": [made]}
    report_of_a_run.write(report, tmp_path / "deep" / "r.json")
    text = (tmp_path / "deep" / "r.md").read_text()
    assert json.loads((tmp_path / "deep" / "r.json").read_text()) == report
    assert text.startswith("# a GPU\n") and "commit abc (changed since)" in text
    assert "| tokens=1 | bf16 | triton | 2.0 | 1.0 to 3.0 | 50 | device_read | torch-loop 2.50 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_without_a_gpu_it_says_so():
    done = suite("--part", "transfer")
    assert done.returncode == 3
    assert "no CUDA device was found; --virtual" in done.stderr


def test_a_failed_piece_does_not_stop_the_next():
    def wrong(context):
        raise AssertionError("off by one")

    def lacking(context):
        raise Skip("no such thing")

    context = Context(True, "cpu", "a6000-paper")
    failed, skipped, fine = (run(Piece("engine", "p", f), context) for f in (wrong, lacking, lambda _: {"n": 1}))
    assert (failed["status"], failed["message"]) == ("failed", "AssertionError: off by one")
    assert "wrong" in failed["traceback"]
    assert (skipped["status"], skipped["message"]) == ("skipped", "no such thing")
    assert (fine["status"], fine["numbers"]) == ("ok", {"n": 1})


def test_end_to_end_pieces(monkeypatch):
    """On the modelled clock, two of the policies; each number is there and finite."""
    monkeypatch.setattr(policy, "names", lambda: ("apex", "no_assign"))
    context = Context(True, "cpu", "a6000-paper")
    results = {p.name: run(p, context) for p in pieces.PIECES if p.part == "e2e" and p.name in ("policies", "layers_by_torch", "range_cost")}
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(("policies", "layers_by_torch", "range_cost"), "ok")
    numbers = results["policies"]["numbers"]
    assert numbers["times"] == "modelled on a6000-paper" and numbers["left out for time"] == 0
    by = numbers["by policy"]
    assert set(by) == {"apex", "no_assign"}
    for row in by.values():
        assert 0 < row["tpot_ms"] < row["ttft_ms"] < 1000 and row["tokens_per_s"] == pytest.approx(1e3 * part_e2e.BATCH / row["tpot_ms"])
    assert by["no_assign"]["exact_per_step"] == 0 < by["apex"]["exact_per_step"]
    table = report_of_a_run.markdown({"command": "make", "environment": {"gpu": None, "cpu": "", "packages": {}, "commit": "", "dirty": False}, "results": list(results.values())})
    assert "| by policy | ttft_ms | tpot_ms | tokens_per_s | hit_rate | exact_per_step |" in table and f"| no_assign | {by['no_assign']['ttft_ms']:.4g} |" in table
    assert (results["layers_by_torch"]["numbers"]["steps"], results["layers_by_torch"]["numbers"]["layers"]) == (3, 4)
    assert results["range_cost"]["numbers"]["tool attached"] is False


def test_every_part_has_a_clock_below_nine_minutes():
    assert set(suite_main.BUDGET_S) == set(pieces.PARTS) and max(suite_main.BUDGET_S.values()) < 9 * 60


def test_unknown_part_is_refused():
    with pytest.raises(ValueError, match="there are kernels, transfer, engine, e2e"):
        pieces.piece("cpu")
