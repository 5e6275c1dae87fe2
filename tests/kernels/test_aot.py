"""The ahead-of-time gate: its counting on small texts, its verdicts on made-up reports, and one real run in a process."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from apexk.kernels.aot import kept
from apexk.kernels.aot.compile import Report
from apexk.kernels.aot.gate import compare, failures, main
from apexk.kernels.aot.sass import Counts, count, width
from apexk.kernels.aot.targets import TARGETS, occupancy

ROOT = Path(__file__).parents[2]

SASS = """
        /*0000*/                   LDG.E.64 R2, desc[UR4][R2.64] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R7], desc[UR4][R4.64] ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/              @P0  BRA 0x20 ;
        /*0040*/                   LDSM.16.MT88.4 R20, [R20] ;
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0060*/              @!P1 LDGSTS.E.BYPASS.128 [R7], desc[UR4][R4.64] ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R8, R14, R4 ;
        /*0080*/             @!UP2 BRA 0x40 ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00a0*/                   STL [R1], R4 ;
"""


def test_counts_of_all_and_of_the_hottest_loop():
    everything, loop = count(SASS)
    assert everything.instructions == 11 and loop.instructions == 5
    assert everything.copies == {128: 2} and loop.copies == {128: 1}
    assert loop.mma == {"HMMA.16816": 2} and loop.ldmatrix == 1
    assert everything.loads == {64: 1} and everything.stores == {128: 1} and everything.local == 1


def test_a_wait_on_a_barrier_is_no_loop():
    assert count("/*0000*/ BAR.SYNC 0x0 ;\n/*0010*/ @P0 BRA 0x0 ;")[1].instructions == 0


@pytest.mark.parametrize("op, bits", [("LDG.E.128", 128), ("LDG.E", 32), ("LDG.E.U16", 16), ("LDG.E.S8", 8), ("STG.E.64", 64)])
def test_width(op, bits):
    assert width(op) == bits


def test_occupancy_names_what_limits():
    assert occupancy(86, 48, 30720, 4).blocks == 3 and occupancy(86, 48, 30720, 4).limiter == "smem"
    assert occupancy(90, 255, 1024, 8).limiter == "regs"
    assert not occupancy(86, 48, 110_592, 4).fits and occupancy(90, 48, 110_592, 4).fits


def test_need_is_littles_law():
    assert TARGETS[86].need_kib == pytest.approx(768e9 * 600e-9 / 84 / 1024)


LOOP = Counts(instructions=50, mma=Counter({"HMMA.16816": 8}), copies=Counter({128: 5}))
GOOD = Report("_gated_gemm_kernel", "case", 86, "3.9.0", "12.9", 48, 0, 30720, True, 4, 4, 3, 25, "smem", 67.5, 5.4, LOOP, LOOP, True)
TILE = dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, SWAP_AB=False)


@pytest.mark.parametrize("change, says", [
    (dict(), None),
    (dict(spill_bytes=8), "8 bytes spilled"),
    (dict(fits=False), "30720 bytes of shared memory, the target allows 101376"),
    (dict(loop=Counts(copies=Counter({128: 5}))), "no tensor-core instruction"),
    (dict(loop=replace(LOOP, copies=Counter())), "not pipelined"),
    (dict(loop=replace(LOOP, copies=Counter({128: 4, 32: 1}))), "are 4x128 1x32 bits wide"),
    (dict(loop=replace(LOOP, loads=Counter({32: 1}))), "are 5x128 1x32 bits wide"),
    (dict(inflight_kib=3.0), "3.0 KiB in flight on an SM, memory needs 5.4"),
    (dict(half=False, loop=Counts(copies=Counter({128: 4, 32: 4}))), "are 4x128 4x32 bits wide"),
    (dict(half=False, loop=Counts(copies=Counter({128: 4}), loads=Counter({128: 2}))), None),
])  # fmt: skip
def test_verdicts(change, says):
    wrong = failures(replace(GOOD, **change), TILE)
    assert not wrong if says is None else any(says in text for text in wrong), wrong


def test_wgmma_is_wanted_where_64_rows_meet_the_tensor_core():
    hopper = replace(GOOD, target=90)
    assert "wgmma expected" in failures(hopper, {**TILE, "BLOCK_M": 64})[0]
    assert "wgmma expected" in failures(hopper, {**TILE, "BLOCK_N": 64, "SWAP_AB": True})[0]
    assert not failures(hopper, TILE)


def test_kept_table_comes_back_and_shows_what_got_worse(tmp_path):
    before = kept.entry(GOOD, "gated 16x32x64")
    kept.save(tmp_path / "deep" / "table.jsonl", [before])
    assert kept.load(tmp_path / "deep" / "table.jsonl") == {(86, "gated 16x32x64"): before}
    assert kept.load(tmp_path / "none.jsonl") == {}
    assert kept.regressions(before, before) == []
    assert kept.regressions(kept.entry(replace(GOOD, regs=60, blocks=4), ""), before) == []
    assert "2 blocks an SM, kept 3" in kept.regressions(kept.entry(replace(GOOD, blocks=2), ""), before)
    assert "spills 4 bytes, kept 0" in kept.regressions(kept.entry(replace(GOOD, spill_bytes=4), ""), before)
    narrow = replace(GOOD, loop=replace(LOOP, copies=Counter({32: 5})))
    assert "copies [32], kept [128]" in kept.regressions(kept.entry(narrow, ""), before)
    assert "not in the kept table" in kept.regressions(before, None)[0]


def test_a_launch_that_is_gone_fails_the_whole_table_only(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kept, "FOLDER", tmp_path)
    both = [(replace(GOOD, label=label), TILE) for label in ("one", "two")]
    assert compare(both, keep=True, whole=True) == [] and len(kept.load(kept.path_of("3.9.0"))) == 2
    assert compare(both, keep=False, whole=True) == compare(both[:1], keep=False, whole=False) == []
    ((where, name, text),) = compare(both[:1], keep=False, whole=True)
    assert where == "sm_86" and " two " in name and "not launched any more" in text
    elsewhere = [(replace(GOOD, target=90), TILE)]
    assert all("not in the kept table" in text for *_, text in compare(elsewhere, keep=False, whole=True))


def test_the_pinned_triton_has_its_table_for_every_target():
    """Else the gate would have nothing to compare with and pass."""
    pinned = re.search(r"^triton==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M).group(1)
    assert {target for target, _ in kept.load(kept.path_of(pinned))} == {80, 86, 89, 90, 100, 120}
    assert {target for target, _ in kept.load(kept.path_of("3.6.0"))} == {90}


def test_the_repository_keeps_a_table_without_spills():
    tables = sorted(kept.FOLDER.glob("triton-*.jsonl"))
    assert tables
    for path in tables:
        entries = kept.load(path)
        assert 90 in {t for t, _ in entries}
        assert all(e["spill_bytes"] == 0 for e in entries.values())


def test_unknown_target_is_misuse(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--targets", "70"])
    assert error.value.code == 2 and "unknown targets [70]; known: 80, 86" in capsys.readouterr().err


@pytest.mark.slow
def test_gate_passes_for_what_the_wrappers_launch(tmp_path):
    """One target of one model; `make gate` has the others."""
    pytest.importorskip("triton")
    program = "import sys; from apexk.kernels.aot.gate import main\nif __name__ == '__main__': sys.exit(main(sys.argv[1:]))"
    path = tmp_path / "gate.py"
    path.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(path), "--quick", "--targets", "90", "--json", str(tmp_path / "gate.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    reports = json.loads((tmp_path / "gate.json").read_text())
    assert {r["target"] for r in reports} == {90}
    assert any("HGMMA" in kind for r in reports for kind in r["loop"]["mma"])
