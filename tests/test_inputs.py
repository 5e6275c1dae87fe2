"""A native library that was built before its sources changed is said to be."""

import os
from pathlib import Path

import pytest

from apexk import inputs
from apexk.device.native import library as transfer
from apexk.kernels.cpu import library as cpu
from apexk.policy.native import library as policies


@pytest.mark.parametrize("folder", ["src", "include"])
def test_sources_newer_than_the_library(tmp_path, caplog, folder):
    library, source = tmp_path / "_some.so", tmp_path / folder / "loop.h"
    source.parent.mkdir()
    for path, time in ((source, 100), (library, 200)):
        path.touch()
        os.utime(path, (time, time))
    inputs.tell_if_older(library, tmp_path, "some/build.py")
    assert not caplog.text
    os.utime(source, (300, 300))
    inputs.tell_if_older(library, tmp_path, "some/build.py")
    assert "_some.so is older than loop.h" in caplog.text and "run `python some/build.py`" in caplog.text


@pytest.mark.parametrize(("module", "load"), [(cpu, cpu.load), (transfer, transfer.load), (policies, policies.load)], ids=lambda m: getattr(m, "__name__", ""))
def test_every_native_library_is_looked_at(monkeypatch, module, load):
    asked = []
    monkeypatch.setattr(module, "tell_if_older", lambda *what: asked.append(what))
    load.__wrapped__()
    ((library, room, build),) = asked
    assert library.is_file() and (room / "src").is_dir() and library.parent == room
    assert (room / "build.py").samefile(Path(__file__).parents[1] / build), "the command names the room's own"
