"""Ranges as a tool gets them: a small recorder attached through NVTX_INJECTION64_PATH, Python's and native threads'."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import apexk
from apexk import nvtx
from apexk.device.virtual import VirtualDevice
from apexk.nvtx import COLORS, LAYER, NOTHING, PAYLOADS, SUBMIT, Ranges
from apexk.timeline.schema import KINDS, PHASES

ROOT = Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="needs g++ on Linux")
needs_nvtx = pytest.mark.skipif(nvtx.nvtx is None, reason="nvtx is not installed")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Folder of the recorder and of a library whose threads emit ranges."""
    folder = tmp_path_factory.mktemp("nvtx")
    for name in ("nvtx_recorder", "nvtx_threads"):
        source = ROOT / "tests" / "native" / f"{name}.cpp"
        subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'profiling' / 'native'}",
                        "-o", folder / f"{name}.so", source, "-ldl"], check=True)  # fmt: skip
    return folder


def record(built, code, *arguments, attach=True):
    """(what the tool was told, the program's output)."""
    written = built / "record.txt"
    written.unlink(missing_ok=True)
    env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "APEXK_NVTX_RECORD": str(written)}
    if attach:
        env["NVTX_INJECTION64_PATH"] = str(built / "nvtx_recorder.so")
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return written.read_text().split("\n")[:-1] if written.exists() else [], done.stdout


def nest(lines):
    """The pushes by thread, as (depth, category, message, payload); every pop closes what its own thread opened last."""
    threads, depth = {}, {}
    for line in lines:
        what, thread, domain, *rest = line.split(" ")
        assert domain == "apexk"
        if what == "push":
            category, message, payload, at = rest
            assert int(at) == depth.get(thread, 0)
            depth[thread] = depth.get(thread, 0) + 1
            threads.setdefault(thread, []).append((int(at), category, message, int(payload)))
        else:
            depth[thread] -= 1
            assert depth[thread] == int(rest[0])
    assert not any(depth.values()), "a range stayed open"
    return threads


def test_kinds_have_colours_and_payloads():
    assert set(COLORS) == {LAYER, SUBMIT, *PHASES, *KINDS}
    assert set(PAYLOADS) <= set(COLORS)


def test_without_a_tool_a_range_is_nothing():
    ranges = Ranges(2)
    assert not ranges.active
    assert ranges("plan", 1, payload=3) is NOTHING
    with ranges(LAYER, 0), ranges("plan", 0):
        pass


def test_without_a_tool_the_engine_has_no_ranges(trained):
    """What profiling costs a run that nobody profiles: nothing, the device is as it is."""
    model, _ = trained()
    with apexk.swap(model, apexk.ApexConfig(pool=4)) as handle:
        assert type(handle.engine.device) is VirtualDevice


def test_without_nvtx(monkeypatch):
    monkeypatch.setattr(nvtx, "nvtx", None)
    assert Ranges(1)("host.ffn", 0) is NOTHING


def test_unknown_kind_is_refused():
    with pytest.raises(KeyError, match="copy.fast"):
        Ranges(1)("copy.fast", 0)


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


@needs_compiler
@needs_nvtx
def test_with_a_tool(built):
    lines, _ = record(built, USE)
    (pushes,) = nest(lines).values()
    assert pushes == [(0, "layer", "L02", 11), (1, "copy.exact", "L02/copy.exact", 5), (0, "plan", "L00/plan", 0)]


NATIVE = """
import ctypes, sys, threading
from apexk.nvtx import LAYER, Ranges
with Ranges(8)(LAYER, 7, payload=2):
    print(ctypes.CDLL(sys.argv[1]).run_native_threads(), threading.get_native_id())
"""


@needs_compiler
@needs_nvtx
def test_native_threads(built):
    """Each thread's ranges are its own, beside those of the Python thread that waits for them."""
    lines, printed = record(built, NATIVE, built / "nvtx_threads.so")
    active, main = printed.split()
    threads = nest(lines)
    assert active == "1" and len(threads) == 3
    assert threads.pop(main) == [(0, "layer", "L07", 2)]
    channel, worker = threads.values()
    assert channel == [(0, "copy.exact", "L07/copy.exact", 5), (0, "copy.exact", "L07/copy.exact", 300)]
    assert worker == [(0, "host.ffn", "L07/host.ffn", 3), (1, "host.rows", "L07/host.rows", 1 << 40)]


TRANSFERS = """
import torch
from apexk.device.native.channel import Channel, Copy
from apexk.device.native.fake import FakeCuda
from apexk.device.native.hand_off import HandOff
from apexk.kernels.cpu.ffn import HostFFN

runtime, ffn = FakeCuda(), HostFFN(threads=1)
weights = torch.randn(2, 3 * 16 * 16)
source, slot = runtime.empty_pinned((1, 4096), torch.uint8), runtime.empty_device((1, 4096), torch.uint8)
channel = Channel(runtime, runtime.new_stream("h2d"))
landed = runtime.new_event()
channel.speculate([Copy(1, 5, slot.data_ptr(), source.data_ptr(), 4096, landed, expert=37)])
while not channel.stop(4).landed:
    pass
hand_off, down = HandOff(runtime, ffn, max_experts=2, how="flags"), runtime.new_stream("down")
x, out = (runtime.empty_pinned((1, 16), torch.float32) for _ in range(2))
ids, pair = runtime.empty_pinned((1, 1), torch.int64).zero_(), runtime.empty_pinned((1, 1), torch.float32)
hand_off.wait(hand_off.submit(down, x, torch.tensor([row.data_ptr() for row in weights]), ids, pair, [0, 1], out, intermediate=16, layer=6))
channel.close(), hand_off.close(), ffn.close(), runtime.close()
"""


@needs_compiler
def test_the_transfer_layers_threads(built):
    """The channel's thread and the hand-off's each say what they launch."""
    lines, _ = record(built, TRANSFERS)
    found = sorted(nest(lines).values())
    assert len(found) == 2 and found[1] == [(0, "host.ffn", "L06/host.ffn", 2)]
    assert found[0] and set(found[0]) == {(0, "copy.spec", "L05/copy.spec", 37)}  # one a piece


@needs_compiler
def test_native_threads_without_a_tool(built):
    lines, printed = record(built, "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).run_native_threads())", built / "nvtx_threads.so", attach=False)
    assert lines == [] and printed == "0\n"


HEADERS = [path.parents[1] for path in (*Path("/usr/local").glob("cuda*/include/nvtx3/nvToolsExt.h"), Path("/usr/include/nvtx3/nvToolsExt.h")) if path.exists()]


@needs_compiler
@pytest.mark.skipif(not HEADERS, reason="NVIDIA's NVTX headers are not installed")
def test_native_layouts_are_nvidias():
    source = ROOT / "tests" / "native" / "nvtx_layout.cpp"
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", f"-I{HEADERS[0]}", f"-I{ROOT / 'profiling' / 'native'}", source], check=True)


def test_native_words_are_the_same():
    text = (ROOT / "profiling" / "native" / "apexk_nvtx.h").read_text()
    names = text.split("NAMES[KINDS] = {")[1].split("}")[0].replace('"', "").split(", ")
    assert set(names) <= set(COLORS) and set(names) <= set(PAYLOADS)



MODEL = """
import sys, apexk
from apexk.demo import model as demo
model, tokenizer = demo.load()
with apexk.swap(model, apexk.ApexConfig(pool=6, timeline=sys.argv[1])):
    demo.generate(model, tokenizer, demo.prompts(2), 3)
"""


@needs_compiler
@needs_nvtx
def test_a_swapped_model(built, tmp_path):
    """The timeline's operations, in its order, each inside its layer and that inside its pass."""
    from apexk.timeline import read

    lines, _ = record(built, MODEL, tmp_path / "t.jsonl")
    (pushes,) = nest(lines).values()
    rows = read(tmp_path / "t.jsonl").rows
    steps = {row["step"]: row["phase"] for row in rows}
    assert [p[1:] for p in pushes if p[0] == 0] == [(phase, phase, step) for step, phase in steps.items()]
    layers = [(row["layer"], row["step"]) for row in rows if row["kind"] == "route"]
    assert [(int(p[2][1:]), p[3]) for p in pushes if p[0] == 1] == layers
    kinds = ("route", "copy.exact", "gpu.resident", "gpu.arrived", "combine")
    wanted = [(row["kind"], row["layer"], _payload(row)) for row in rows if row["kind"] in kinds]
    assert [(p[1], int(p[2][1:3]), p[3]) for p in pushes if p[0] == 2 and p[1] in kinds] == wanted


def _payload(row):
    return {"experts": len(row["experts"]), "expert": row["experts"][:1] and row["experts"][0], "tokens": row["tokens"]}[PAYLOADS[row["kind"]]]
