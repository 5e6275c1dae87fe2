"""The kernels' own sources as CPU functions: `kernels[name]` has the signature of a loaded CUDA function."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from apexk.kernels.cpu.build import compiler
from apexk.kernels.cuda import build

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    try:
        command = compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    made = {}
    for name in build.KERNELS:
        unit = folder / f"{name}.cpp"
        unit.write_text(
            f'#include "{HERE / "cuda_on_cpu.h"}"\n#include "{build.source(name)}"\n'
            f'extern "C" void launch(int grid, int block, const unsigned long long* raw) {{ launch_on_cpu({name}, grid, block, raw); }}\n'
        )
        library = folder / f"{name}.so"
        subprocess.run([*command, "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", str(unit), "-o", str(library)], check=True)
        made[name] = _function(ctypes.CDLL(str(library)))
    return made


def _function(library):
    def kernel(grid, block, arguments):
        library.launch(*grid, *block, (ctypes.c_uint64 * len(arguments))(*arguments))

    return kernel
