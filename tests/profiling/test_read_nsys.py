"""nsys exports built by the documented schema, with answers worked out by hand; no file of a real nsys has been read yet."""

import importlib.util
import sqlite3
from pathlib import Path

import pytest

from profiling.attribution import ProfileError
from profiling.layers import layer_lines
from profiling.load import load
from profiling.read_nsys import read_nsys

_spec = importlib.util.spec_from_file_location("nsys_file", Path(__file__).with_name("nsys_file.py"))
nsys_file = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(nsys_file)
NsysFile, OLD, NOW, LATEST = nsys_file.NsysFile, nsys_file.OLD, nsys_file.NOW, nsys_file.LATEST

MAIN, CHANNEL, WORKER = 1, 2, 3


def one_layer(file):
    """Layer 3 of decode pass 12. Routed at 1200; window to the merge's end at 3000.

    Copies 1300-1700 (expert 5) and 1700-2100 (expert 9, in two pieces); kernels 1250-1400, 2100-2500; CPU 1300-2700;
    activations there 1210-1260 and back 2700-2800; a prefetch for layer 4 from 2100 to 2600.
    """
    file.domain()
    file.range("decode", 900, 2900, MAIN, 12)
    file.range("L03", 1000, 2890, MAIN, 12)
    file.range("L03/route", 1010, 1200, MAIN, 4)
    file.kernel(1020, 1100, file.call(1015, MAIN))
    file.copy(1110, 1150, file.call(1030, MAIN, "cudaMemcpyAsync"), 64, kind=2)
    file.range("L03/submit", 1205, 1220, MAIN, 3)
    file.copy(1210, 1260, file.call(1206, MAIN, "cudaMemcpyAsync"), 4096)
    file.range("L03/host.ffn", 1300, 2700, WORKER, 3, registered=False)
    file.range("L03/host.rows", 2700, 2800, WORKER, 8192)
    file.range("L03/copy.exact", 1230, 1240, CHANNEL, 5)
    file.copy(1300, 1700, file.call(1231, CHANNEL, "cudaMemcpyAsync"), 1000)
    file.range("L03/copy.exact", 1241, 1260, CHANNEL, 9)
    file.copy(1700, 1900, file.call(1242, CHANNEL, "cudaMemcpyAsync"), 500)
    file.copy(1900, 2100, file.call(1250, CHANNEL, "cudaMemcpyAsync"), 500)
    file.range("L04/copy.spec", 1270, 1280, CHANNEL, 2)
    file.copy(2100, 2600, file.call(1271, CHANNEL, "cudaMemcpyAsync"), 1000)
    file.range("L03/gpu.resident", 1222, 1240, MAIN, 2)
    file.kernel(1250, 1350, file.call(1223, MAIN, "cuLaunchKernel", event_class=1))
    file.kernel(1350, 1400, file.call(1228, MAIN))
    file.kernel(1400, 1450, file.call(1245, MAIN))  # between the ranges: a shared expert
    file.range("L03/gpu.arrived", 1260, 1280, MAIN, 2)
    file.kernel(2100, 2500, file.call(1262, MAIN))
    file.range("L03/combine", 2600, 2880, MAIN, 4)
    file.kernel(2900, 3000, file.call(2650, MAIN))


@pytest.fixture
def built(tmp_path, request):
    path = tmp_path / "report.sqlite"
    file = NsysFile(path, getattr(request, "param", NOW))
    yield path, file


@pytest.mark.parametrize("built", [OLD, NOW, LATEST], indirect=True)
def test_a_layer_by_hand(built):
    path, file = built
    one_layer(file)
    file.close()
    recording = load(path)
    (line,) = layer_lines(recording.rows)
    assert (line.step, line.layer, line.phase, line.tokens) == (12, 3, "decode", 4)
    wanted = {
        "critical_ns": 1800, "transfer_ns": 800, "transfer_bytes": 2000, "gpu_compute_ns": 550, "gpu_path_ns": 1300, "cpu_compute_ns": 1400,
        "cpu_path_ns": 1550, "exposed_exact_ns": 700, "exposed_wall_ns": 0, "overlap_xc_ns": 800, "overlap_gc_ns": 500, "hidden_spec_ns": 0,
        "n_exact": 2, "n_cpu": 3, "n_resident": 2, "n_spec": 0, "load_cpu": 0, "load_gpu": 0,
    }  # fmt: skip
    # activations: 1210-1260 and 2700-2800 beside 1300-2700; copies are exposed but for 1300-1400
    assert {name: getattr(line, name) for name in wanted} == wanted
    assert line.last == "cpu" and line.n_active is None
    kinds = [(row["kind"], row["lane"], row["start_ns"]) for row in recording.rows]
    assert ("shared", "gpu", 1400) in kinds and ("copy.spec", "h2d", 2100) in kinds and ("host.rows", "h2d", 1210) in kinds
    (spec,) = [row for row in recording.rows if row["kind"] == "copy.spec"]
    assert (spec["layer"], spec["step"], spec["experts"], spec["bytes"]) == (4, 12, [2], 1000)
    assert recording.header["versions"]["nsys"] in (OLD, NOW, LATEST) and recording.header["device"] == "a GPU"
    facts = recording.header["profile"]
    assert (facts["no_call"], facts["outside"], facts["pageable_copies"], facts["syncs_in_layers"], facts["open_ranges"]) == (0, 0, 0, 0, 0)


def test_passes_and_what_lies_between(built):
    """Attention belongs to the layer that follows it; before the first pass and behind the last nothing is known."""
    path, file = built
    file.domain()
    file.kernel(100, 200, file.call(90, MAIN))  # before the first pass
    for step, at in ((0, 1000), (1, 2000)):
        file.range("prefill" if step == 0 else "decode", at, at + 500, MAIN, step)
        for layer in (0, 1):
            start = at + 200 * layer
            if layer or step:
                file.kernel(start - 40, start - 20, file.call(start - 50, MAIN))
            file.range(f"L{layer:02d}", start, start + 100, MAIN, step)
            file.kernel(start + 5, start + 9, file.call(start + 2, MAIN))  # in the layer, before its router
            file.range(f"L{layer:02d}/route", start + 10, start + 20, MAIN, 7)
            file.range(f"L{layer:02d}/combine", start + 30, start + 90, MAIN, 7)
            file.kernel(start + 50, start + 60, file.call(start + 40, MAIN))
    file.kernel(2900, 2950, file.call(2900, MAIN))  # the model's head: no layer follows
    file.kernel(2910, 2960, file.call(2900, 9))  # another thread's
    file.close()
    recording = read_nsys(path)
    attention = [(row["step"], row["layer"], row["phase"], row["start_ns"]) for row in recording.rows if row["kind"] == "attention"]
    assert attention == [(0, 0, "prefill", 1005), (0, 1, "prefill", 1160), (0, 1, "prefill", 1205),
                         (1, 0, "decode", 1960), (1, 0, "decode", 2005), (1, 1, "decode", 2160), (1, 1, "decode", 2205)]  # fmt: skip
    assert [(line.step, line.layer, line.critical_ns) for line in layer_lines(recording.rows)] == [(0, 0, 40), (0, 1, 40), (1, 0, 40), (1, 1, 40)]
    assert recording.header["profile"]["outside"] == 3


def test_quirks(built):
    """Open ranges, ranges that end elsewhere, foreign domains and threads, NULL processes, lost calls, unpinned memory, waits."""
    path, file = built
    one_layer(file)
    file.domain("torch", 2)
    file.range("L03/gpu.resident", 1400, 1500, MAIN, 9, domain=2)
    file.range("L03", 1500, None, MAIN, 12)
    file.range("L03/copy.exact", 1500, 1600, MAIN, 1, end_thread=WORKER)
    file.kernel(2510, 2520, 999_999)  # its call was dropped
    file.kernel(2520, 2530, file.call(1270, MAIN), process=False)  # inside gpu.arrived
    file.range("L03/copy.exact", 1285, 1299, CHANNEL, 11)
    file.copy(2600, 2700, file.call(1286, CHANNEL), 1000, source=0)
    file.copy(1290, 1299, file.call(1288, MAIN, "cudaMemcpyAsync"), 77)  # in the layer, in no operation: the rest of a prefetch
    file.call(1300, MAIN, "cudaStreamSynchronize_v3020", length=50)
    file.call(1100, MAIN, "cudaEventSynchronize_v3020", length=50)  # the routing's own
    file.close()
    recording = read_nsys(path)
    facts = recording.header["profile"]
    assert (facts["open_ranges"], facts["moved_ranges"], facts["no_call"], facts["outside"]) == (1, 1, 1, 1)
    assert (facts["pageable_copies"], facts["pageable_bytes"]) == (1, 1000)
    assert (facts["syncs_in_layers"], facts["sync_ns"]) == (1, 50)
    (line,) = layer_lines(recording.rows)
    assert (line.n_exact, line.gpu_compute_ns) == (3, 560)


def test_kernels_of_a_graph_belong_to_its_launch(built):
    """They share the correlation of one cudaGraphLaunch; a text-file range (type 70) counts like a pushed one."""
    path, file = built
    file.domain()
    file.range("decode", 0, 500, MAIN, 4, kind=70)
    file.range("L00", 10, 490, MAIN, 4)
    file.range("L00/route", 20, 30, MAIN, 1)
    file.range("L00/gpu.resident", 40, 60, MAIN, 6)
    launch = file.call(45, MAIN, "cudaGraphLaunch_v10000")
    file.kernel(100, 150, launch)
    file.kernel(170, 200, launch)
    file.range("L00/combine", 70, 90, MAIN, 1)
    file.kernel(200, 210, file.call(75, MAIN))
    file.close()
    (line,) = layer_lines(read_nsys(path).rows)
    assert (line.gpu_compute_ns, line.n_resident, line.critical_ns, line.step) == (80, 6, 180, 4)


def test_two_processes_with_the_same_correlations(built):
    path, file = built
    one_layer(file)
    before = file.process
    file.pid, file._calls = 78, 0
    assert file.process != before
    file.kernel(1250, 1300, file.call(1015, MAIN))  # correlation 1 once more, of a thread without ranges
    file.close()
    recording = read_nsys(path)
    assert recording.header["profile"]["outside"] == 1
    (line,) = layer_lines(recording.rows)
    assert line.gpu_compute_ns == 550


def test_no_device_activity(built):
    """Tables exist only if they have data: ranges alone still give the host's times."""
    path, file = built
    file.domain()
    file.range("decode", 0, 100, MAIN, 0)
    file.range("L00", 0, 100, MAIN, 0)
    file.range("L00/route", 10, 20, MAIN, 1)
    file.range("L00/host.ffn", 20, 70, WORKER, 2)
    file.range("L00/combine", 70, 80, MAIN, 1)
    file.close()
    (line,) = layer_lines(read_nsys(path).rows)
    assert (line.critical_ns, line.cpu_path_ns, line.n_cpu, line.last) == (60, 50, 2, "cpu")


def test_wrong_files_are_named(tmp_path, built):
    path, file = built
    file.range("decode", 0, 1, MAIN, 0)
    file.close()
    with pytest.raises(ProfileError, match="no NVTX domain 'apexk'"):
        read_nsys(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE songs (title TEXT)")
    with pytest.raises(ProfileError, match="no table NVTX_EVENTS: it is no export of Nsight Systems .tables: songs"):
        load(other)
    text = tmp_path / "r.sqlite"
    text.write_text("hello")
    with pytest.raises(ProfileError, match="no SQLite file"):
        load(text)
    report = tmp_path / "r.nsys-rep"
    report.write_bytes(b"\0\1\2")
    with pytest.raises(ProfileError, match="nsys export --type sqlite"):
        load(report)
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ProfileError, match="SQLite cannot read it|has no"):
        load(cut)


def test_a_missing_column_is_named(tmp_path):
    path = tmp_path / "r.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, globalTid INTEGER, text TEXT)")
    with pytest.raises(ProfileError, match="table NVTX_EVENTS lacks the column eventType; it has end, globalTid, start, text"):
        read_nsys(path)


def test_it_is_opened_read_only(built):
    path, file = built
    one_layer(file)
    file.close()
    before = path.read_bytes()
    path.chmod(0o444)
    read_nsys(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
