"""The native self-test on emulated instruction sets, its power to see faults, and what the objects contain."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from apexk.kernels.cpu import build, library
from apexk.kernels.cpu.tests.mutants import MUTANTS

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86-64 instruction sets")
BUILD = Path(build.__file__).resolve().parents[2] / "build"
EMULATED = ["amx", "avx512_bf16", "avx512"]


@pytest.fixture(scope="session")
def emulated() -> Path:
    """A folder with the library, its objects and the self-test, every instruction set emulated."""
    if not library.isa_names()["avx2"]:
        pytest.skip("the emulation is compiled for AVX2")
    folder = BUILD / "cpu-emulated"
    build.build_test("selftest", build.build(folder, folder, emulate=True))
    return folder


@pytest.fixture(scope="session")
def native() -> Path:
    folder = BUILD / "cpu"
    for stem in ("selftest", "nodes"):
        build.build_test(stem, build.build(folder, folder))
    return folder


@pytest.mark.parametrize("name", EMULATED)
def test_emulated(emulated, name):
    subprocess.run([emulated / "selftest", name], check=True)


def test_native(native):
    """Every instruction set of this machine, on memory that ends at an inaccessible page."""
    done = subprocess.run([native / "selftest"], check=True, capture_output=True, text=True)
    ran = re.findall("(.*): as expected", done.stdout)
    assert ran == [name for name, runs in library.isa_names().items() if runs]


def test_memory_nodes(native):
    """Two nodes that only the test knows of: which rows a thread takes first, and the same bits as on one node."""
    subprocess.run([native / "nodes"], check=True)


def test_every_instruction_set_ran_natively():
    missing = [name for name, runs in library.isa_names().items() if not runs]
    if missing:
        pytest.skip(f"ran only emulated, if at all, for want of such a machine: {', '.join(missing)}")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(emulated, tmp_path, mutant):
    source = tmp_path / "source"
    shutil.copytree(build.HERE, source, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    file = source / "src" / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, "the mutant no longer fits its source"
    file.write_text(text.replace(mutant.old, mutant.new))
    changed = build.compile_one(mutant.unit, build.sources(emulate=True)[mutant.unit], tmp_path, source_dir=source)
    others = [path for path in emulated.glob("*.o") if path.name != changed.name]
    build.link([changed, *others], tmp_path)
    selftest = shutil.copy(emulated / "selftest", tmp_path)
    done = subprocess.run([selftest, mutant.isa], capture_output=True, text=True, timeout=600)
    assert done.returncode != 0, f"the self-test passes with this fault in {mutant.file}"


def disassembly(path: Path) -> str:
    return subprocess.run(["objdump", "-d", "--no-show-raw-insn", path], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_lower_objects_hold_no_higher_instruction(native):
    """Neither in an object compiled for less, nor in a function that the linker could take for another file's."""
    for unit in build.sources():
        text = disassembly(native / f"{unit}.o")
        wide, mid = bool(re.search("%zmm|%k[0-7]", text)), "%ymm" in text
        assert wide == unit.startswith(("ffn_avx512", "ffn_amx")), unit
        assert mid == unit.startswith(("ffn_a",)), unit
    assert "tdpbf16ps" in disassembly(native / "ffn_amx.o")
    assert "vdpbf16ps" in disassembly(native / "ffn_avx512_bf16.o")


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")
@pytest.mark.parametrize("unit", [unit for unit in build.X86])
def test_instruction_set_objects_share_no_function(native, unit):
    """Only the tables leave such an object: a weak function in it could replace the portable copy at link time."""
    symbols = subprocess.run(["nm", "-C", native / f"{unit}.o"], check=True, capture_output=True, text=True).stdout
    shared = [line for line in symbols.splitlines() if line.split()[-2] in "TWVuBC"]
    assert not shared
