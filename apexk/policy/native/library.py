"""Loads the policies' native code. It is optional: Python does the same, bit for bit, in several times the time."""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from apexk.inputs import tell_if_older

LIBRARY = Path(__file__).with_name("_apexk_policy.so")

log = logging.getLogger("apexk")


@cache
def load() -> ctypes.PyDLL | None:
    """Kept under Python's lock: a decision is shorter than giving it away. None where the library was not built."""
    if not LIBRARY.is_file():
        log.warning("policies run in Python, which takes several times as long: %s is not built", LIBRARY)
        return None
    tell_if_older(LIBRARY, LIBRARY.parent, "apexk/policy/native/build.py")
    try:
        library = ctypes.PyDLL(str(LIBRARY))
        library.apexk_scan.argtypes = [c_char_p, c_int64, c_char_p, c_char_p, c_int64, c_char_p, c_void_p]
        library.apexk_utility_update.argtypes = [c_char_p, c_int64, c_char_p, c_char_p, c_int64, c_int32, c_void_p]
        library.apexk_utility_lowest.argtypes = [c_char_p, c_int64, c_char_p, c_int64, c_int64, c_void_p]
    except (OSError, AttributeError) as broken:
        log.warning("policies run in Python, which takes several times as long: %s: build it again", broken)
        return None
    return library
