"""The paper's rows: calibration from fit targets alone, bands judged rightly, every target shown, and the bands met."""

import ast
import json
from pathlib import Path

import pytest

from apexk import hardware
from apexk.cli import main
from apexk.paper import calibration, figures, motivation, results, rows, sensitivity
from apexk.paper.targets import FIT_ROLES, for_fit, load
from apexk.sim import offset


def test_calibration_gives_the_hardware_file():
    """Each constant as derived from the paper's numbers, to the digits that the file holds."""
    found, machine = calibration.constants(), hardware.load("a6000-paper")
    for name, digits in (("cpu.c0", 2), ("cpu.b", 4), ("link.s0", 2), ("link.t1", 3)):
        section, key = name.split(".")
        assert round(found[name], digits) == getattr(getattr(machine, section), key), name
    assert found["layer.kappa"] == pytest.approx(machine.layer.kappa, abs=0.01)


def test_calibration_reads_fit_targets_only(monkeypatch):
    """The module has no other access to the targets, and each one it asks for has a role that allows it."""
    asked = []
    monkeypatch.setattr(calibration, "for_fit", lambda id: asked.append(id) or for_fit(id))
    calibration.constants()
    assert len(asked) == 10 and {load()[id].role for id in asked} <= set(FIT_ROLES)
    for module in (calibration, offset):
        tree = ast.parse(Path(module.__file__).read_text())
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
        assert not names & {"load", "PATH", "targets", "rows"}
        assert "targets.json" not in Path(module.__file__).read_text()
    for id in ("table3.apex.tput", "fig7.r96.tpot", "derived.table3.ea.tput"):
        with pytest.raises(ValueError, match="a calibration may read"):
            for_fit(id)


def test_layer_offset_is_fitted_to_a_fit_target():
    assert for_fit("table3.none.tput") == offset.TARGET_TOKENS_PER_S


@pytest.mark.parametrize(
    ("id", "variant", "ours", "status", "deviation"),
    [
        ("table3.none.tput", "", 72.44 * 1.004, "met", 0.4), ("table3.none.tput", "", 72.44 * 1.006, "missed", 0.6),
        ("table3.apex.tput", "", 103.35 * 0.89, "missed", -11), ("table3.apex.tput", "rates", 103.35 * 0.89, "met", -11),
        ("fig3c.r32.cpu_share", "", 0.777, "met", None), ("fig3c.r32.cpu_share", "", 0.779, "missed", None),
        ("derived.postfetch.min", "", 74.0, "missed", None), ("derived.postfetch.min", "", 99.0, "met", None),
        ("fig3d.best_P", "", 4, "met", 0), ("fig3d.best_P", "", 2, "missed", -50), ("fig7.r96.tpot", "", 160.0, "report-only", None),
    ],
)  # fmt: skip
def test_bands(id, variant, ours, status, deviation):
    row = rows.number("x", id, ours, variant)
    assert row.status == status
    assert deviation is None or row.deviation == pytest.approx(deviation, abs=0.01)


def test_bands_name_targets():
    assert {key.partition(", ")[0] for key in rows.BANDS} <= load().keys()


def test_every_target_has_its_row(monkeypatch):
    """All figures on made-up measurements: each target comes at least once."""
    from collections import defaultdict

    found = [row for figure in figures.FIGURES.values() for row in figure(lambda *a, **k: defaultdict(lambda: 1.0))]
    found += rows.untouched({row.id.partition(", ")[0] for row in found})
    assert {row.id.partition(", ")[0] for row in found} >= load().keys()
    assert {row.status for row in found} <= {"met", "missed", "report-only"}


def test_paper_verb(tmp_path, capsys):
    out = tmp_path / "p.json"
    assert main(["paper", "fig3c", "--seeds", "0", "--jobs", "1", "--json", str(out), "--draw", str(tmp_path)]) == 0
    data = json.loads(out.read_text())
    assert [r["status"] for r in data["rows"]].count("met") == 4 and (tmp_path / "fig3c.png").stat().st_size > 5000
    assert "4 met, 0 missed" in capsys.readouterr().out
    assert main(["paper", "fig2", "--draw", str(tmp_path)]) == 0
    assert all((tmp_path / f"fig2-{name}.png").stat().st_size > 5000 for name in ("pure-gpu", "static", "apex"))


def test_sensitivity_points():
    places = sensitivity.points()
    assert {} in places and len(places) == 1 + 9 + 11
    assert len({tuple(sorted(p.items())) for p in places}) == len(places)


@pytest.mark.nightly
def test_all_bands_are_met():
    names = ["fig3c", "fig3d", "table3", "pools"]
    found, _ = figures.rows(names, seeds=(0, 1, 2))
    missed = [row for row in found if row.status == "missed"]
    assert not missed
    assert sum(row.status == "met" for row in found) >= 35


def test_figures_by_name():
    assert set(figures.FIGURES) == {"fig1", "fig3a", "fig3b", "fig3c", "fig3d", "fig5", "fig6", "fig7", "table1", "table2", "table3", "pools"}
    assert results.BASELINES == ("fiddler_static", "post_fetch", "mixtral_offloading") and motivation.COUNTS == (0, 2, 4, 8, 12)
