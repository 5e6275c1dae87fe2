"""The gate: its verdicts on made-up counts, what it says without a compiler, and one real target where there is one."""

import json
from collections import Counter

import pytest

from apexk.kernels.aot.sass import Counts
from apexk.kernels.cuda import build
from apexk.kernels.cuda.gate import failures, main

GOOD = Counts(loads=Counter({128: 8, 32: 4}), stores=Counter({128: 8, 32: 1}), atomics=2)


def made(kernel="slot_gather", spills=0):
    return build.Compiled(kernel, 90, None, 48, spills, 0)


@pytest.mark.parametrize(("compiled", "counts", "says"), [
    (made(), GOOD, None),
    (made(spills=8), GOOD, "8 bytes spilled"),
    (made(), Counts(loads=Counter({64: 16}), stores=GOOD.stores, atomics=2), "reads are {64: 16}"),
    (made(), Counts(loads=GOOD.loads, stores=Counter({32: 32}), atomics=2), "stores are {32: 32}"),
    (made("slot_ready"), Counts(loads=Counter({32: 3}), atomics=1), None),
    (made("slot_ready"), Counts(loads=Counter({32: 3})), "nothing raises the flag"),
])  # fmt: skip
def test_verdicts(compiled, counts, says):
    wrong = failures(compiled, counts)
    assert not wrong if says is None else any(says in text for text in wrong), wrong


def test_without_a_compiler_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("NVCC", "no-such-compiler")
    assert main([]) == 3
    assert "NOT COVERED" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="install the CUDA toolkit"):
        build.compile_one("slot_gather", 90)


def test_unknown_target_is_misuse():
    with pytest.raises(SystemExit) as error:
        main(["--targets", "70"])
    assert error.value.code == 2


@pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed")
def test_a_target_passes(tmp_path, capsys):
    pytest.importorskip("triton")
    assert main(["--targets", "90", "--json", str(tmp_path / "gate.json")]) == 0, capsys.readouterr().out
    rows = json.loads((tmp_path / "gate.json").read_text())
    assert [(r["kernel"], r["sm"], r["spill"]) for r in rows] == [("slot_gather", 90, 0), ("slot_ready", 90, 0)]
