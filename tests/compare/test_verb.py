"""`apexk compare`: what it shows and writes, and what it refuses."""

import csv
import json

import pytest

from apexk.cli import main
from apexk.sim.trace import samples


def test_the_verb_writes_what_it_shows(tmp_path, capsys):
    out = {name: tmp_path / f"a.{name}" for name in ("json", "csv", "png", "md")}
    code = main(["compare", "--systems", "kt_dynamic,post_fetch", "--trace", samples()[0], "--hardware", "pinned-link", "--prompt", "2", "--pool", "4",
                 "--jobs", "1", "--json", str(out["json"]), "--csv", str(out["csv"]), "--picture", str(out["png"]), "--page", str(out["md"])])
    assert code == 0
    shown = capsys.readouterr().out
    assert "modelled" in shown and "kt_dynamic" in shown and "clairvoyant" in shown
    rows = json.loads(out["json"].read_text())["rows"]
    with out["csv"].open() as file:
        lines = list(csv.DictReader(file))
    assert [r["system"] for r in rows] == [line["system"] for line in lines] == ["kt_dynamic", "post_fetch", "clairvoyant", "all_resident"]
    assert float(lines[0]["decode_tokens_per_s"]) == pytest.approx(rows[0]["mean"]["decode_tokens_per_s"])
    assert out["png"].read_bytes().startswith(b"\x89PNG") and "a.png" in out["md"].read_text()


@pytest.mark.parametrize(("words", "said"), [(["--systems", "best"], "unknown policy"), (["--preset", "noise"], "unknown preset"), (["--model", "gpt9"], "unknown model"),
                                             (["--hardware", "h900"], "no hardware file"), (["--pool", "999"], "wanted 0..256")])  # fmt: skip
def test_bad_input_is_named(words, said, capsys):
    assert main(["compare", "--batch", "1", "--prompt", "1", "--steps", "1", "--jobs", "1", "--systems", "apex", *words]) == 2
    assert said in capsys.readouterr().err
