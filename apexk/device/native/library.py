"""Loads the native libraries through ctypes and gives their functions types. See include/*.h."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from apexk.device.runtime import CudaError
from apexk.inputs import tell_if_older
from apexk.kernels.cpu.library import FFNCall

HERE = Path(__file__).resolve().parent
TRANSFER = HERE / "_apexk_transfer.so"
FAKE = HERE / "_apexk_fake_cuda.so"

OK, BAD_ARGUMENT, FULL, CUDA, NO_MEMORY, NO_THREAD, NOT_DONE, WORKER = range(8)


class CudaApi(ctypes.Structure):
    """`apexk_cuda_api`: addresses of functions, 0 where there is none."""

    _fields_ = [
        ("set_device", c_void_p),
        ("memcpy_async", c_void_p),
        ("event_create", c_void_p),
        ("event_destroy", c_void_p),
        ("event_record", c_void_p),
        ("event_query", c_void_p),
        ("event_synchronize", c_void_p),
        ("stream_wait_event", c_void_p),
        ("stream_synchronize", c_void_p),
        ("launch_host_func", c_void_p),
        ("stream_write_value64", c_void_p),
        ("stream_wait_value64", c_void_p),
        ("get_last_error", c_void_p),
    ]


class NativeCopy(ctypes.Structure):
    """`apexk_copy`."""

    _fields_ = [
        ("dst", c_void_p),
        ("src", c_void_p),
        ("bytes", c_uint64),
        ("after", c_void_p),
        ("start", c_void_p),
        ("done", c_void_p),
        ("tag", c_int64),
        ("layer", c_int32),
        ("error", c_int32),
        ("expert", c_int32),
        ("reserved", c_int32),
    ]


class NativeStopped(ctypes.Structure):
    """`apexk_stopped`."""

    _fields_ = [
        ("landed", c_int32),
        ("failed", c_int32),
        ("error", c_int32),
        ("reserved", c_int32),
        ("running", c_int64),
        ("left", c_uint64),
    ]


class CpuQueue(ctypes.Structure):
    """`apexk_cpu_queue`."""

    _fields_ = [("pool", c_void_p), ("submit", c_void_p), ("release", c_void_p)]


_SIGNATURES = {  # name -> (result, arguments)
    "apexk_transfer_status_text": (ctypes.c_char_p, [c_int32]),
    "apexk_channel_create": (c_int32, [POINTER(CudaApi), c_int32, c_void_p, c_uint64, c_int32, POINTER(c_void_p), POINTER(c_int32)]),
    "apexk_channel_copy": (c_int32, [c_void_p, POINTER(NativeCopy), c_int32, c_void_p, c_void_p]),
    "apexk_channel_speculate": (c_int32, [c_void_p, POINTER(NativeCopy), c_int32]),
    "apexk_channel_stop": (c_int32, [c_void_p, c_int32, POINTER(c_int64), POINTER(NativeStopped)]),
    "apexk_channel_keep": (c_int32, [c_void_p, c_int64, POINTER(c_int32)]),
    "apexk_channel_abandon": (c_int32, [c_void_p, c_int64]),
    "apexk_channel_in_flight": (c_uint64, [c_void_p]),
    "apexk_channel_destroy": (None, [c_void_p]),
    "apexk_hand_off_create": (c_int32, [POINTER(CudaApi), POINTER(CpuQueue), c_int32, c_void_p, c_uint64, c_int32, c_int32,
                                        POINTER(c_void_p), POINTER(c_int32)]),
    "apexk_hand_off_submit": (c_int32, [c_void_p, POINTER(FFNCall), c_void_p, c_int32, POINTER(c_uint64), POINTER(c_int32)]),
    "apexk_hand_off_join": (c_int32, [c_void_p, c_uint64, c_void_p, POINTER(c_int32)]),
    "apexk_hand_off_wait": (c_int32, [c_void_p, c_uint64, c_int64, POINTER(c_int32), POINTER(c_int64), POINTER(c_int64)]),
    "apexk_hand_off_failure": (c_int32, [c_void_p, POINTER(c_uint64), POINTER(c_int32)]),
    "apexk_hand_off_destroy": (c_int32, [c_void_p, c_int64]),
}


@cache
def load(path: Path = TRANSFER) -> ctypes.CDLL:
    """The transfer library, loaded at first use. No thread starts here. Another `path`: another build of it, for tests."""
    library = open_library(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def open_library(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise ImportError(
            f"{path} is missing: the transfer layer is not built. In a checkout run `python apexk/device/native/build.py` "
            "(needs g++), otherwise reinstall apexk."
        )
    if path.parent == HERE:
        tell_if_older(path, HERE, "apexk/device/native/build.py")
    return ctypes.CDLL(str(path))


class Native:
    """An object of the library: `noun` is what messages call it, `_close` destroys it, calls store a CUDA error in `_error`."""

    noun: str
    _close: weakref.finalize
    _error: c_int32

    def _raise_for(self, what: str, status: int) -> None:
        """`CudaError`, `ValueError` or `RuntimeError` for a status that is not OK."""
        if status == OK:
            return
        self._raise_if_closed()
        if status == CUDA:
            raise CudaError(what, self._error.value)
        raise (ValueError if status == BAD_ARGUMENT else RuntimeError)(f"{what}: {status_text(status)}")

    def _raise_if_closed(self) -> None:
        if not self._close.alive:
            raise ValueError(f"this {self.noun} is closed")


def status_text(status: int) -> str:
    return load().apexk_transfer_status_text(status).decode()
