"""`apexk overhead`: every figure is there and says what it is; how large they are is no test's business."""

import json

import pytest

from apexk import cli


def test_every_figure(tmp_path, capsys):
    assert cli.main(["overhead", "--repeats", "8", "--policy", "apex,no_assign", "--json", str(tmp_path / "o.json")]) == 0
    said = capsys.readouterr().out
    rows = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert {r["what"] for r in rows} >= {"decide", "check", "launch", "layer", "hand_over", "copy_call"}
    assert {r["policy"] for r in rows} == {"apex", "no_assign", None}
    assert all(r["us"] > 0 and r["yardsticks"] > 0 for r in rows)
    assert all(r["what"] in said for r in rows) and "Nothing here was measured on a GPU" in said


def test_too_few_repeats(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["overhead", "--repeats", "1"])
    assert ended.value.code == cli.MISUSE
    assert "argument --repeats: '1'" in capsys.readouterr().err
