"""The transfer pieces' own code on the fake runtime: they check what arrives; their numbers are not looked at."""

import pytest

from profiling.gpu_suite import part_engine, part_transfer  # noqa: F401 - they register their pieces
from profiling.gpu_suite.pieces import PIECES, Context, run

CONTEXT = Context(True, "cpu", "a6000-paper")


@pytest.mark.parametrize("piece", [p for p in PIECES if p.part == "transfer"], ids=lambda p: p.name)
def test_virtual_pieces_are_right(piece):
    result = run(piece, CONTEXT)
    expected = "skipped" if piece.name == "host_to_device" else "ok"
    assert result["status"] == expected, result["message"]


@pytest.mark.parametrize("name", ["both_transfers", "steady_state", "memcheck"])
def test_what_needs_a_gpu_says_so(name):
    (piece,) = (p for p in PIECES if p.name == name)
    assert run(piece, CONTEXT)["status"] == "skipped"
