"""Loads the native library through ctypes and gives its functions their types. See include/apexk_cpu.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

from apexk.inputs import tell_if_older

PATH = Path(__file__).resolve().parent / "_apexk_cpu.so"

OK, BAD_ARGUMENT, BAD_EXPERT_ID, NO_BLOCK, MISALIGNED, UNKNOWN_ISA, UNAVAILABLE_ISA, NO_MEMORY, NO_THREAD = range(9)


class FFNCall(ctypes.Structure):
    """`apexk_ffn_call`."""

    _fields_ = [
        ("x", c_void_p),
        ("blocks", c_void_p),
        ("topk_ids", c_void_p),
        ("topk_weights", c_void_p),
        ("experts", c_void_p),
        ("out", c_void_p),
        ("tokens", c_int64),
        ("x_stride", c_int64),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("topk", c_int32),
        ("num_experts", c_int32),
        ("expert_count", c_int32),
        ("id_bytes", c_int32),
        ("dtype", c_int32),
        ("activation", c_int32),
        ("biases", c_int32),
        ("weight_on_input", c_int32),
        ("summed", c_int32),
    ]


class LinearCall(ctypes.Structure):
    """`apexk_linear_call`."""

    _fields_ = [
        ("x", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("tokens", c_int64),
        ("x_stride", c_int64),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("dtype", c_int32),
    ]


_SIGNATURES = {  # name -> (result, arguments)
    "apexk_pool_create": (c_int32, [c_int32, c_char_p, POINTER(c_void_p)]),
    "apexk_pool_create_at": (c_int32, [c_char_p, c_int32, c_char_p, POINTER(c_void_p)]),
    "apexk_pool_destroy": (None, [c_void_p]),
    "apexk_pool_threads": (c_int32, [c_void_p]),
    "apexk_pool_isa": (c_char_p, [c_void_p]),
    "apexk_ffn_run": (c_int32, [c_void_p, POINTER(FFNCall)]),
    "apexk_ffn_run_in": (c_int32, [c_void_p, POINTER(FFNCall), c_void_p]),
    "apexk_ffn_submit": (c_int32, [c_void_p, POINTER(FFNCall), c_void_p, c_void_p, POINTER(c_void_p)]),
    "apexk_linear_run": (c_int32, [c_void_p, POINTER(LinearCall), c_void_p]),
    "apexk_job_done": (c_int32, [c_void_p]),
    "apexk_job_wait": (c_int32, [c_void_p]),
    "apexk_job_release": (None, [c_void_p]),
    "apexk_default_threads": (c_int32, []),
    "apexk_machine_at": (c_int32, [c_char_p, *[POINTER(c_int32)] * 3]),
    "apexk_isa_count": (c_int32, []),
    "apexk_isa_name": (c_char_p, [c_int32]),
    "apexk_isa_available": (c_int32, [c_int32]),
    "apexk_status_text": (c_char_p, [c_int32]),
}


@cache
def load(path: Path = PATH) -> ctypes.CDLL:
    """The library, loaded at first use. No thread starts here. Another `path`: another build of it, for tests."""
    if not path.is_file():
        raise ImportError(
            f"{path} is missing: the CPU kernels are not built. In a checkout run `python kernels/cpu/build.py` "
            "(needs g++), otherwise reinstall apexk."
        )
    if path == PATH:
        tell_if_older(path, path.parent, "kernels/cpu/build.py")
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def status_text(status: int) -> str:
    return load().apexk_status_text(status).decode()


class Machine(NamedTuple):
    """What this process may use."""

    threads: int  # the default: min(cores in the affinity mask, cgroup quota)
    limit: int  # beyond it threads only take turns: min(processors in the affinity mask, cgroup quota)
    nodes: int  # memory nodes with a processor that may be used


def machine(root: str = "", path: Path = PATH) -> Machine:
    """`root`: a folder with copies of /proc and /sys files, for tests."""
    numbers = [c_int32() for _ in Machine._fields]
    status = load(path).apexk_machine_at(root.encode(), *map(ctypes.byref, numbers))
    if status != OK:
        raise MemoryError(status_text(status))
    return Machine(*(number.value for number in numbers))


def isa_names(path: Path = PATH) -> dict[str, bool]:
    """Every implementation in the library, best first, and whether this machine runs it."""
    library = load(path)
    return {
        library.apexk_isa_name(i).decode(): bool(library.apexk_isa_available(i))
        for i in range(library.apexk_isa_count())
    }
