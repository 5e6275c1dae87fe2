"""Hardware files: the shipped one says the documented numbers, and a broken one is named with its fault."""

import copy
import json

import pytest

from apexk import hardware

GOOD = json.loads((hardware._HERE / "a6000-paper.json").read_text())


def write(tmp_path, data):
    path = tmp_path / "machine.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_paper_costs():
    """Hand-computed from the calibration: CPU 2.02 + 0.0171 a pair, copies 0.66 + 0.365 each, GPU 0.4 + 0.004 e + 0.001 p."""
    machine = hardware.load("a6000-paper")
    assert machine.cpu_ms(3, 100) == pytest.approx(3.73)
    assert machine.cpu_ms(0, 0) == pytest.approx(2.02), "this machine pays the hand-over of an empty CPU set"
    assert machine.copy_ms(False, True) + 3 * machine.copy_ms(False, False) == pytest.approx(2.12)
    assert machine.copy_ms(True, True) == pytest.approx(1.025)
    assert machine.gpu_ms(10, 50, first=True) == pytest.approx(0.49)


def test_empty_cpu_set_is_free_where_the_file_says_so(tmp_path):
    data = copy.deepcopy(GOOD)
    data["cpu"]["fixed_when_empty"] = False
    assert hardware.load(write(tmp_path, data)).cpu_ms(0, 0) == 0


def change(path, value):
    def apply(data):
        *front, last = path
        for key in front:
            data = data[key]
        if value is None:
            del data[last]
        else:
            data[last] = value

    return apply


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (change(["schema"], "apexk.hardware/9"), "schema"),
        (change(["unit"], "us"), "unit"),
        (change(["name"], None), "name"),
        (change(["gpu"], None), "section 'gpu'"),
        (change(["gpu", "g0"], None), "g0"),
        (change(["gpu", "g7"], 1), "g7"),
        (change(["cpu", "c0"], "fast"), "cpu.c0"),
        (change(["cpu", "c0"], True), "cpu.c0"),
        (change(["link", "t1"], -0.1), "link.t1"),
        (change(["link", "t1"], float("nan")), "link.t1"),
        (change(["cpu", "fixed_when_empty"], 1), "fixed_when_empty"),
        (change(["layer", "kappa"], 0.5), "kappa"),
        (change(["layer", "kappa"], 1e5), "kappa"),
        (change(["model"], [1, 2]), "model"),
        (change(["cpu", "c0"], 10**400), "cpu.c0"),
        (change(["link", "s0"], 1e305), "link.s0"),
        (change(["overrides", "utility_decay"], 5.0), "utility_decay"),
        (change(["overrides", "colour"], "red"), "overrides.colour"),
        (change(["overrides", "in_flight"], "maybe"), "overrides.in_flight"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(tmp_path, fault, said):
    data = copy.deepcopy(GOOD)
    fault(data)
    path = write(tmp_path, data)
    with pytest.raises(ValueError, match="machine.json") as error:
        hardware.load(path)
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\x00", "[" * 100_000])
def test_no_json(tmp_path, text):
    with pytest.raises(ValueError, match="machine.json"):
        hardware.load(write(tmp_path, text))


def test_unknown_name_lists_what_there_is():
    with pytest.raises(ValueError, match="a6000-paper"):
        hardware.load("h900")


def test_a_payload_shortens_the_copy_and_adds_its_dequantisation():
    """A quarter of the bytes: 0.365/4 + 1.25 * 0.004 a copy; set-up as it was."""
    plain = hardware.load("a6000-paper")
    light = hardware.with_payload(plain, 0.25)
    assert light.copy_ms(False, False) == pytest.approx(0.09125 + 0.005)
    assert light.copy_ms(False, True) - light.copy_ms(False, False) == pytest.approx(0.66)
    assert light.model["bytes_per_expert"] == plain.model["bytes_per_expert"] // 4
    assert (light.cpu, light.gpu, light.layer, light.link.s_sp) == (plain.cpu, plain.gpu, plain.layer, plain.link.s_sp)
