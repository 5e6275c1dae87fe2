"""The suite on a machine without a GPU: kernel pieces run virtually, the rest is told apart from failures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from profiling.gpu_suite import pieces
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


def test_unknown_part_is_refused():
    with pytest.raises(ValueError, match="there are kernels, transfer, engine, e2e"):
        pieces.piece("cpu")
