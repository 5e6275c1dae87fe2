"""The scripts around Nsight, with stand-ins for nsys and ncu on PATH that note how they were called; and `apexk profile`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from apexk.cli import main
from profiling import roofline

SCRIPTS = Path(__file__).resolve().parents[2] / "profiling"
TOOL = """#!/bin/bash
echo "$(basename "$0") $*" >> "$(dirname "$0")/calls"
exit ${FAIL:-0}
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder first on PATH; `tools(name, ...)` puts stand-ins there, and returns a function that gives their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(*names):
        for name in names:
            (folder / name).write_text(TOOL)
            (folder / name).chmod(0o755)
        return lambda: (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []

    return put


def script(name, *arguments, **env):
    return subprocess.run(["bash", str(SCRIPTS / name), *map(str, arguments)], capture_output=True, text=True, env=os.environ | env)


def test_nsys_captures_exports_and_reports(tools, tmp_path):
    calls = tools("nsys")
    done = script("nsys_profile.sh", tmp_path / "deep" / "run", "python", "my script.py")
    assert done.returncode == 0, done.stderr
    profile, export, stats = calls()
    for word in ("--trace=cuda,nvtx,osrt", "--capture-range=cudaProfilerApi", "--cuda-graph-trace=node", f"--output={tmp_path}/deep/run"):
        assert word in profile
    assert profile.endswith("python my script.py") and (tmp_path / "deep").is_dir()
    assert export.startswith("nsys export --type=sqlite") and export.endswith("run.nsys-rep")
    assert "nvtx_sum" in stats and stats.endswith("run.sqlite")


def test_dry_runs_do_nothing(tools, tmp_path):
    calls = tools("nsys", "ncu")
    for name, first in (("nsys_profile.sh", tmp_path / "x" / "run"), ("ncu_kernel.sh", "combine/triton")):
        done = script(name, "--dry-run", first, "python", "-V")
        assert done.returncode == 0 and name.split("_")[0] in done.stdout
    assert calls() == [] and not (tmp_path / "x").exists()


def test_a_missing_tool_is_said(tools, tmp_path):
    tools()
    for name, word in (("nsys_profile.sh", "--tool torch"), ("ncu_kernel.sh", "nsight-compute")):
        done = script(name, tmp_path / "x", "true")
        assert done.returncode == 3 and "is missing: install" in done.stderr and word in done.stderr
        assert script(name).returncode == 2


def test_ncu_profiles_one_case(tools, tmp_path, monkeypatch):
    calls = tools("ncu")
    monkeypatch.chdir(tmp_path)
    case = "combine/triton/cuda/bf16/qwen3.5-35b-a3b/1"
    assert main(["kernels", "triton", "--case", case, "--ncu"]) == 0
    profile, read = calls()
    named = f"ncu-{case.replace('/', '-')}"
    assert "--profile-from-start off" in profile and profile.endswith(f"-m apexk.cli kernels once {case}")
    assert f"--export {named}" in profile and f"--import {named}.ncu-rep" in read
    monkeypatch.setenv("FAIL", "1")
    done = script("ncu_kernel.sh", "combine")
    assert done.returncode == 1 and "ERR_NVGPUCTRPERM" in done.stderr


@pytest.mark.parametrize(("case", "said"), [("nosuch", "no benchmark case matches 'nosuch'"), ("combine", "means 12 cases, wanted one"), ("moe_ffn/torch-loop/cpu/*/1", "runs on the CPU")])
def test_ncu_is_not_run_without_one_case_of_a_gpu(tools, case, said, capfd):
    calls = tools("ncu")
    assert main(["kernels", "triton", "--case", case, "--ncu"]) == 2
    assert said in capfd.readouterr().err and calls() == []


def test_profile_with_torch(tmp_path, capsys):
    """Without nsys, or a GPU: the trace and the timeline hold the same passes, the warm-up only in the timeline."""
    from apexk.timeline import read
    from profiling.load import load

    assert main(["profile", "--out", str(tmp_path), "--tool", "torch", "--device", "virtual", "--tokens", "3", "--prompts", "2"]) == 0
    steps = [{(row["step"], row["phase"]) for row in r.rows} for r in (load(tmp_path / "trace.json"), read(tmp_path / "timeline.jsonl"))]
    assert steps[0] == {(4, "prefill"), (5, "decode"), (6, "decode")} and {step for step, _ in steps[1]} == set(range(7))
    printed = capsys.readouterr().out
    assert "measured by torch.profiler on cpu" in printed and "times modelled on a6000-paper" in printed


def test_profile_with_nsys(tools, tmp_path, capfd):
    calls = tools("nsys")
    assert main(["profile", "--tool", "nsys", "--out", str(tmp_path), "--dry-run", "--device", "virtual"]) == 0
    printed = capfd.readouterr().out
    assert calls() == [] and "profile --inside" in printed and f"apexk report {tmp_path}/nsys.sqlite" in printed
    assert main(["profile", "--out", str(tmp_path), "--", "python", "mine.py"]) == 1, "the stand-in wrote no export"
    assert calls()[0].endswith("python mine.py")
    assert f"wrote no {tmp_path}/nsys.sqlite" in capfd.readouterr().err
    assert main(["profile", "--tool", "torch", "--", "python", "mine.py"]) == 3
    assert "cannot look into another program" in capfd.readouterr().err


ROW = {"op": "ffn", "device": "a CPU", "commit": "0123456789abc", "dirty": False, "flops": 4000, "bytes": 1000, "p50_ns": 100.0}
ROOFS = [{"op": "roof", "name": f"roof/{name}", "device": "a CPU", "value": value, "unit": unit} for name, value, unit in (("host_read", 20.0, "GB/s"), ("host_fp32", 100.0, "GFLOP/s"))]


def test_roofline(tmp_path, capsys):
    rows = [*ROOFS, {**ROW, "name": "a", "provider": "cpu-avx2"}, {**ROW, "name": "a", "provider": "cpu-avx2", "p50_ns": 90.0},
            {**ROW, "name": "b", "provider": "torch", "flops": 90_000}, {**ROW, "name": "c", "provider": "x", "flops": 0}]  # fmt: skip
    path, png = tmp_path / "rows.jsonl", tmp_path / "r.png"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["kernels", "plot", str(path), str(png)]) == 0
    assert "2 points" in capsys.readouterr().out and png.read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}, indent=1))
    assert roofline.draw(roofline.read_rows(tmp_path / "rows.json"), png, dark=True) == 2
    with pytest.raises(ValueError, match="no row with operations on 'gpu'; devices: a CPU"):
        roofline.draw(rows, png, "gpu")
    path.write_text("[1]")
    with pytest.raises(ValueError, match="holds no benchmark rows"):
        roofline.read_rows(path)
