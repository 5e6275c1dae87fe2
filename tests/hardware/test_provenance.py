"""Each constant of each shipped hardware file says whether it was measured, fitted or assumed."""

import json
from dataclasses import fields

import pytest

from apexk import hardware


@pytest.mark.parametrize("name", hardware.names())
def test_every_constant_is_marked(name):
    machine = hardware.load(name)
    said = json.loads((hardware._HERE / f"{name}.json").read_text())["provenance"]
    marked = {key.strip() for keys in said for key in keys.split(",")}
    constants = {f.name for part in (machine.cpu, machine.link, machine.gpu, machine.layer, machine.exchange) for f in fields(part)}
    assert marked == constants
    assert all(text.split(":")[0].split(";")[0].split()[0] in ("measured", "fitted", "assumed") for text in said.values())


def test_the_pinned_link_is_the_papers_machine_but_for_the_link():
    paper, pinned, quick = (hardware.load(n) for n in ("a6000-paper", "pinned-link", "pinned-link-c0.3"))
    assert (pinned.link.t1, pinned.link.s0, pinned.link.s_sp) == (0.252, 0.05, 0.02)
    assert pinned.gpu == paper.gpu and pinned.layer == paper.layer and pinned.cpu.c0 == paper.cpu.c0
    assert quick.link == pinned.link and quick.cpu.c0 == 0.3 and not quick.cpu.fixed_when_empty
    assert pinned.link.t1 == pytest.approx(pinned.model["bytes_per_expert"] / 25e9 * 1e3, rel=0.01)
