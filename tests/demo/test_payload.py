"""What lossy copies cost, against the library's own loss and against plain arithmetic on the weights."""

import json

import pytest
import torch

from apexk import cli
from apexk.config import ApexConfig
from apexk.demo import model as demo
from apexk.demo.payload import CHUNK, measure

TOKENS = CHUNK + 40


@pytest.fixture(scope="module")
def rows():
    return {row.payload: row for row in measure(ApexConfig(policy="no_assign", pool=32), ("plain", "int8", "int4"), TOKENS)}


def test_perplexity_is_the_librarys_own(rows, trained):
    model, tokenizer = trained()
    ids = tokenizer("\n".join(demo.splits()[1]), return_tensors="pt")["input_ids"][:, :TOKENS]
    with torch.no_grad():
        losses = [model(input_ids=part, labels=part).loss.double() * (part.shape[1] - 1) for part in ids.split(CHUNK, 1)]
    wanted = (sum(losses) / (TOKENS - 2)).exp().item()
    assert rows["unpatched"].tokens == TOKENS - 2 and rows["unpatched"].perplexity == pytest.approx(wanted, rel=1e-5)
    assert rows["plain"].perplexity == pytest.approx(wanted, rel=1e-5) and rows["plain"].largest_error < 1e-3 and rows["plain"].changed == 0


def test_fewer_bits_cost_more_and_say_so(rows):
    assert [rows[name].lossless for name in ("unpatched", "plain", "int8", "int4")] == [True, True, False, False]
    assert rows["plain"].largest_error < rows["int8"].mean_error < rows["int4"].mean_error
    assert rows["int4"].copy_bytes < rows["int8"].copy_bytes < rows["plain"].copy_bytes


def test_the_verb_prints_them_and_refuses_what_it_cannot_do(capsys, tmp_path):
    assert cli.main(["payload", "--payload", "int4", "--tokens", "20", "--json", str(tmp_path / "x.json")]) == cli.DONE
    printed = capsys.readouterr().out
    assert "int4" in printed and "NO" in printed and "19 predictions of held-out text" in printed
    (unpatched, lossy) = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert unpatched["lossless"] and not lossy["lossless"] and lossy["mean_error"] > 0
    assert cli.main(["payload", "--payload", "int3"]) == cli.MISUSE and "there are plain, int8, int4" in capsys.readouterr().err
    assert cli.main(["payload", "--tokens", "999999999"]) == cli.MISUSE and "tokens of held-out text asked for" in capsys.readouterr().err
