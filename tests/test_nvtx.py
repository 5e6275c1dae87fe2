"""Ranges with a tool attached (a small library that counts pushes), without one, and without nvtx."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from apexk import nvtx
from apexk.nvtx import COLORS, LAYER, NOTHING, Ranges
from apexk.timeline.schema import KINDS

ROOT = Path(__file__).resolve().parents[1]

# NVTX calls this when NVTX_INJECTION64_PATH names the library. Table 1 holds its callbacks, module 5 is CORE2, whose
# entries 4 and 5 are the push and pop of a domain.
TOOL = """
#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>
typedef int (*export_table)(uint32_t, void***, unsigned*);
typedef const void* (*get_table)(uint32_t);
struct callbacks { size_t size; export_table module_functions; };
struct attributes { uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color; int32_t payload_type;
                    int32_t reserved; union { uint64_t u; int64_t i; double d; } payload; int32_t message_type; };
static int depth = 0;
static int push(void* domain, const struct attributes* a) { printf("push %lld\\n", (long long)a->payload.i); return depth++; }
static int pop(void* domain) { printf("pop\\n"); return --depth; }
int InitializeInjectionNvtx2(get_table get) {
    const struct callbacks* table = get(1);
    void** functions; unsigned count;
    if (!table || !table->module_functions(5, &functions, &count)) return 0;
    *(void**)functions[4] = (void*)push;
    *(void**)functions[5] = (void*)pop;
    setvbuf(stdout, 0, _IONBF, 0);
    return 1;
}
"""

USE = """
from apexk.nvtx import LAYER, Ranges
ranges = Ranges(3)
assert ranges.active and not Ranges(3, enabled=False).active
with ranges(LAYER, 2, payload=11):
    with ranges("copy.exact", 2, payload=5):
        pass
try:
    with ranges("plan", 0):
        raise KeyError
except KeyError:
    pass
"""


def test_every_kind_has_a_colour():
    assert set(COLORS) == {LAYER, *KINDS}


def test_without_a_tool_a_range_is_nothing():
    ranges = Ranges(2)
    assert not ranges.active
    assert ranges("plan", 1, payload=3) is NOTHING
    with ranges(LAYER, 0), ranges("plan", 0):
        pass


def test_without_nvtx(monkeypatch):
    monkeypatch.setattr(nvtx, "nvtx", None)
    assert Ranges(1)("host.ffn", 0) is NOTHING


def test_unknown_kind_is_refused():
    with pytest.raises(KeyError, match="copy.fast"):
        Ranges(1)("copy.fast", 0)


@pytest.mark.skipif(nvtx.nvtx is None, reason="nvtx is not installed")
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++ on Linux")
def test_with_a_tool(tmp_path):
    source, tool = tmp_path / "tool.c", tmp_path / "tool.so"
    source.write_text(TOOL)
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-w", "-o", tool, source], check=True)
    env = {"NVTX_INJECTION64_PATH": str(tool), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", USE], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["push 11", "push 5", "pop", "pop", "push 0", "pop", ""]
