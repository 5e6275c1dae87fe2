"""Benchmarks against a baseline: a kept file, and another commit out of a worktree (here of a small repository made for it)."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from apexk.kernels.bench import compare, once, roofs, run, table
from apexk.kernels.bench.registry import Call, Case


def row(name="ffn/triton/cuda/bf16/1", p50=100.0, spread=10.0, device="gpu"):
    return {"name": name, "op": "ffn", "device": device, "p20_ns": p50 - spread, "p50_ns": p50, "p80_ns": p50 + spread}


@pytest.mark.parametrize("p50, spread, worse", [
    (105.0, 1.0, False),  # within the threshold
    (130.0, 5.0, True),
    (130.0, 25.0, False),  # its faster repeats are the baseline's slower ones
    (60.0, 1.0, False),
])  # fmt: skip
def test_what_a_regression_is(p50, spread, worse):
    ours = row(p50=p50, spread=spread)
    found = compare.compare([ours], [[row()]], "base.jsonl", 0.1)
    assert ours["baseline"] == {"source": "base.jsonl", "p50_ns": 100.0, "ratio": p50 / 100, "regressed": worse}
    assert len(found) == worse and (not worse or "1.30 times the 0.1 us of base.jsonl" in found[0])


def test_the_mean_of_before_and_after_counts():
    ours = row(p50=130.0, spread=1)
    assert compare.compare([ours], [[row(p50=100.0)], [row(p50=150.0)]], "HEAD~1", 0.1) == []
    assert ours["baseline"]["ratio"] == pytest.approx(130 / 125)


def test_other_machines_and_other_cases_do_not_compare():
    new = row(name="new")
    assert compare.compare([new, row()], [[row()]], "base", 0.1) == [] and "baseline" not in new
    assert compare.compare([row()], [[row(device="another")]], "base", 0.1) == []
    with pytest.raises(ValueError, match="base has none of these cases on this device; it has 1 cases on another"):
        compare.in_common({(row()["name"], "gpu")}, [row(device="another")], "base")


def test_baseline_files(tmp_path):
    rows = [{"name": "roof/x", "op": "roof", "device": "gpu"}, row()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}, indent=1))
    assert compare.read_baseline(tmp_path / "a.jsonl") == compare.read_baseline(tmp_path / "a.json") == [row()]
    assert table.read_rows(tmp_path / "a.jsonl") == table.read_rows(tmp_path / "a.json") == rows
    (tmp_path / "b").write_text("hello")
    with pytest.raises(ValueError, match="benchmark rows"):
        compare.read_baseline(tmp_path / "b")


def case(provider="cpu-avx2"):
    return Case("ffn", provider, "cpu", torch.bfloat16, {"tokens": 1}, lambda device: Call(lambda: None, lambda: 0.0, 2000, 8000))


@pytest.fixture
def bench(monkeypatch):
    fixed = {"host_read": roofs.Roof("host_read", 10.0, "GB/s"), "host_fp32": roofs.Roof("host_fp32", 100.0, "GFLOP/s")}
    monkeypatch.setattr(roofs, "roof", fixed.__getitem__)
    monkeypatch.setattr(run, "roofs_of", lambda device: [])
    monkeypatch.setattr(run, "all_cases", lambda: [case()])


def test_the_runner_fails_where_a_case_got_slower(bench, tmp_path, capsys):
    kept = tmp_path / "kept.jsonl"
    assert run.main(["--budget", "0", "--jsonl", str(kept)]) == run.DONE
    (was,) = [json.loads(line) for line in kept.read_text().splitlines()]
    for name, factor, code in (("same", 100.0, run.DONE), ("faster", 1e-9, run.FAILED)):
        path = tmp_path / name
        path.write_text(json.dumps({k: v * factor if k.endswith("_ns") else v for k, v in was.items()}) + "\n")
        assert run.main(["--budget", "0", "--baseline", str(path)]) == code
        assert ("REGRESSED ffn/cpu-avx2/cpu/bf16/1" in capsys.readouterr().out) == (code == run.FAILED)
    assert run.main(["--baseline", str(tmp_path / "none")]) == run.MISUSE
    assert "there is no file" in capsys.readouterr().err


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose first commit has a case that takes 1 ms, whose second lost it, and whose third waits for ever."""
    root = tmp_path / "repository"
    (root / "apexk" / "cli").mkdir(parents=True)
    main = "import json, sys\nrow = {row}\nif '--list' in sys.argv: print(row['name'])\nelse: json.dump({{'rows': [row]}}, open(sys.argv[sys.argv.index('--json') + 1], 'w'))\n"
    (root / "apexk" / "__init__.py").touch()
    (root / "apexk" / "cli" / "__init__.py").touch()

    def git(*arguments):
        return subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    for name in ("ffn/cpu-avx2/cpu/bf16/1", "other"):
        (root / "apexk" / "cli" / "__main__.py").write_text(main.format(row={**row(name, 1e6), "device": run._where("cpu")["device"]}))
        git("add", "-A")
        git("commit", "-q", "-m", name)
    (root / "apexk" / "cli" / "__main__.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)\n")
    git("commit", "-q", "-a", "-m", "waits")
    monkeypatch.setattr(compare, "ROOT", root)
    return git


def test_a_bad_baseline_is_refused_before_anything_is_timed(bench, tmp_path, monkeypatch, capsys):
    (tmp_path / "b").write_text("hello")
    (tmp_path / "c").write_text(json.dumps(row(name="other")))
    monkeypatch.setattr(run, "measure", lambda *_, **__: pytest.fail("timed"))
    for name, said in (("b", "benchmark rows"), ("c", "c has none of these cases on this device; it has 1 cases on gpu")):
        assert run.main(["--baseline", str(tmp_path / name)]) == run.MISUSE
        assert said in capsys.readouterr().err


def test_against_another_commit(bench, repository, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run.main(["--budget", "0", "--against", "HEAD~2", "--json", str(out)]) == run.DONE
    (ours,) = json.loads(out.read_text())["rows"]
    assert ours["baseline"]["source"] == "HEAD~2" and ours["baseline"]["p50_ns"] == 1e6
    assert ours["command"] == "apexk kernels bench ffn/cpu-avx2/cpu/bf16/1"
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bench: ")]
    assert [" ".join(line.split()[1:3]) for line in told] == ["checking out", "asking HEAD~2", "measuring 1", "measuring 1"], "each step that takes its time"
    assert len(repository("worktree", "list").splitlines()) == 1, "the worktree is gone"
    assert run.main(["--against", "no-such-thing"]) == run.MISUSE
    assert "or a git revision" in capsys.readouterr().err


def test_a_commit_without_the_case_is_refused_before_anything_is_timed(bench, repository, monkeypatch, capsys):
    monkeypatch.setattr(run, "measure", lambda *_, **__: pytest.fail("timed"))
    assert run.main(["--budget", "0", "--against", "HEAD~1"]) == run.MISUSE
    assert "HEAD~1 has none of these cases: ffn/cpu-avx2/cpu/bf16/1" in capsys.readouterr().err
    assert len(repository("worktree", "list").splitlines()) == 1


RUN = """
import sys
from pathlib import Path
import torch
from apexk.cli import main
from apexk.kernels.bench import compare, run
from apexk.kernels.bench.registry import Case
compare.ROOT = Path(sys.argv[1])
run.all_cases = lambda: [Case("ffn", "cpu-avx2", "cpu", torch.bfloat16, {"tokens": 1}, None)]
sys.exit(main(["kernels", "bench", "--against", "HEAD"]))
"""


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 0), (signal.SIGKILL, 1)], ids=str)
def test_a_run_that_is_ended_leaves_no_worktree_or_the_next_removes_it(bench, repository, tmp_path, number, left):
    """Ended while the other commit's process works; the worktree of a run that goes on stays."""
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}

    def started():
        before = set((tmp_path / "tmp").glob("*/tree/begun"))
        run = subprocess.Popen([sys.executable, "-c", RUN, str(compare.ROOT)], env=env, stderr=subprocess.DEVNULL)
        while not set((tmp_path / "tmp").glob("*/tree/begun")) - before:  # it may remove those before it begins
            assert run.poll() is None
            time.sleep(0.05)
        return run

    first = started()
    first.send_signal(number)
    assert first.wait() == (-number if number == signal.SIGKILL else 128 + number)
    assert len(list((tmp_path / "tmp").iterdir())) == left == len(repository("worktree", "list").splitlines()) - 1
    second = started()
    assert len(repository("worktree", "list").splitlines()) == 2
    assert run.main(["--budget", "0", "--against", "HEAD~2"]) == run.DONE
    assert len(repository("worktree", "list").splitlines()) == 2, "it is in use"
    second.terminate()
    assert second.wait() == 128 + signal.SIGTERM
    assert not list((tmp_path / "tmp").iterdir()) and len(repository("worktree", "list").splitlines()) == 1


def test_once(monkeypatch, capsys):
    ran = []
    made = Case("ffn", "cpu-avx2", "cpu", torch.bfloat16, {"tokens": 1}, lambda device: Call(lambda: ran.append(1), lambda: 0.0, 1, 1))
    monkeypatch.setattr(once, "all_cases", lambda: [made, case("torch-loop")])
    assert once.main([made.name, "--warmup", "2", "--runs", "3"]) == 0 and len(ran) == 5
    assert once.main(["ffn/*"]) == 2 and "means 2 cases, wanted one" in capsys.readouterr().err
    assert once.main(["nothing"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_once_without_a_gpu(capsys):
    assert once.main(["combine/triton/cuda/bf16/qwen3.5-35b-a3b/1"]) == 3
    assert "needs a CUDA device, which this machine lacks" in capsys.readouterr().err
