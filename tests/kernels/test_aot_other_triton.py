"""The gate under another Triton: how its environment is made, and what is said where it cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest

from apexk.kernels.aot import gate, other_triton

ROOT = Path(__file__).parents[2]


def in_an_environment(monkeypatch, prefix):
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setattr(sys, "base_prefix", "/usr")


def test_what_cannot_be_installed_is_said_loudly(monkeypatch, tmp_path, capsys):
    in_an_environment(monkeypatch, tmp_path)
    monkeypatch.setattr(other_triton.venv, "create", lambda folder, **options: Path(folder).mkdir(parents=True))
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: slow\nERROR: no matching distribution\n")
    monkeypatch.setattr(other_triton.subprocess, "run", lambda *command, **options: failed)
    assert gate.main(["--triton", "0.0.1"]) == 3
    said = capsys.readouterr().err
    assert "!!! NOT COVERED: the gate under Triton 0.0.1" in said and "ERROR: no matching distribution" in said
    assert not (other_triton.folder_of("0.0.1") / "ready").exists()


def test_outside_a_virtual_environment_nothing_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert "no virtual environment" in other_triton.prepare("3.6.0", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_arguments_go_on(monkeypatch):
    asked = {}
    monkeypatch.setattr(gate, "gate_under", lambda version, arguments: asked.update({version: arguments}) or 0)
    assert gate.main(["--triton", "3.6.0", "--targets", "90", "-j", "1", "--keep"]) == 0
    assert asked == {"3.6.0": ["--targets", "90", "--jobs", "1", "--keep"]}


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="shares the packages of a virtual environment")
def test_its_own_packages_come_first_and_ours_behind(monkeypatch, tmp_path):
    """With a made-up Triton instead of the real one, which is 200 MB."""
    folder = tmp_path / "env"

    def install(command, **options):
        package = next(folder.glob("lib*/python*/site-packages")) / "triton"
        package.mkdir()
        (package / "__init__.py").write_text("__version__ = 'made up'\n")
        return subprocess.CompletedProcess(command, 0, "", "")

    with monkeypatch.context() as patched:
        patched.setattr(other_triton.subprocess, "run", install)
        assert other_triton.prepare("9.9", folder) == ""
    assert other_triton.prepare("9.9", folder) == "", "it stands"
    program = "import triton, pytest, apexk; print(triton.__version__, apexk.__file__)"
    done = subprocess.run([folder / "bin" / "python", "-c", program], capture_output=True, text=True, cwd=tmp_path, env=other_triton.environment())
    assert done.stdout.startswith("made up "), done.stderr
