"""What leaves a run: the trace against the trace-event format, the page, the pictures."""

import json
import re
from collections import defaultdict
from html.parser import HTMLParser

import pytest

from apexk.cli import main
from apexk.timeline import read
from profiling import chrome, html, plot
from profiling.tables import layer_table


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Timeline of a few steps of the simulator: copies of both kinds, abandoned ones too."""
    folder = tmp_path_factory.mktemp("sim")
    from apexk.demo.run import run

    run(folder, pool=6, prompts=2, new_tokens=5, policies=["apex"])
    return read(folder / "timeline.jsonl"), folder / "timeline.jsonl"


def test_trace_follows_the_format(recorded):
    """Required fields by phase of the event, times and durations not negative, no two slices of a lane overlap."""
    recording, _ = recorded
    trace = json.loads(json.dumps(chrome.trace(recording), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    lanes, named = defaultdict(list), {}
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} <= set(event) and event["ts"] >= 0
        assert event["ph"] in "XMstf"
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["cat"]
            lanes[event["tid"]].append((round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)))
        elif event["ph"] == "M" and event["name"] == "thread_name":
            named[event["tid"]] = event["args"]["name"]
    assert set(lanes) == set(named) and len(set(named.values())) == len(named)
    for slices in lanes.values():
        slices.sort()
        assert all(a[1] <= b[0] for a, b in zip(slices, slices[1:], strict=False))
    shown = sum(len(slices) for slices in lanes.values()) - len({(r["step"], r["layer"]) for r in recording.rows if r["kind"] == "combine"})
    assert shown == len(recording.rows), "a slice for every row, and one for each layer"


def test_arrows_lead_from_the_decision_to_the_use(recorded):
    """Each copy that landed has one arrow; it starts and ends inside slices, in the order of time."""
    recording, _ = recorded
    events = chrome.trace(recording)["traceEvents"]
    slices = {(e["tid"], e["ts"]): e for e in events if e["ph"] == "X" and e["cat"] != "layer"}
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            assert (event["tid"], event["ts"]) in slices
            arrows[event["id"]].append(event)
    exact = [a for a in arrows.values() if a[0]["name"] == "copy.exact"]
    assert len(exact) == sum(row["kind"] == "copy.exact" for row in recording.rows)
    for points in arrows.values():
        assert points[0]["ph"] == "s" and points[-1]["ph"] == "f" and points[-1]["bp"] == "e"
        assert [p["ts"] for p in points] == sorted(p["ts"] for p in points)
    for points in exact:
        first, copied, used = (slices[p["tid"], p["ts"]] for p in points)
        assert (first["cat"], copied["cat"]) == ("plan", "copy.exact") and used["cat"].startswith("gpu.")
        assert set(copied["args"]["experts"]) <= set(used["args"]["experts"])


def test_overlapping_rows_get_a_second_lane():
    rows = [(0, 10, "a"), (5, 12, "b"), (10, 20, "c"), (12, 13, "d"), (12, 14, "e")]
    assert chrome._apart(rows) == [[(0, 10, "a"), (10, 20, "c")], [(5, 12, "b"), (12, 13, "d")], [(12, 14, "e")]]


def test_the_page_holds_everything_and_loads_nothing(recorded):
    recording, path = recorded
    text = html.page(recording, str(path))
    stack, void = [], {"meta", "source", "img"}

    class Check(HTMLParser):
        def handle_starttag(self, tag, attributes):
            stack.extend([] if tag in void else [tag])
            for name, value in attributes:
                assert name not in ("src", "srcset", "href") or value.startswith("data:image/png;base64,")

        def handle_endtag(self, tag):
            assert stack.pop() == tag

    Check().feed(text)
    assert not stack and not re.search(r"https?://|@import|url\(", text)
    assert text.count("<figure>") == 5
    assert f"<td>{layer_table(recording, 'decode')[2]['window']:.3f}</td>" in text
    assert "&quot;policy&quot;: &quot;apex&quot;" in text


@pytest.mark.parametrize("dark", [False, True])
def test_every_picture(recorded, tmp_path, dark):
    made = plot.draw_all(recorded[0], tmp_path, dark=dark)
    assert [path.stem for path in made] == ["layer_timeline", "path_balance", "transfers", "residency", "estimates"]
    for path in made:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 8_000


def test_pictures_without_data_are_left_out(recorded, tmp_path):
    recording, _ = recorded
    few = [row for row in recording.rows if row["step"] == 0 and row["kind"] != "plan"]
    made = plot.draw_all(type(recording)(recording.header, few), tmp_path)
    assert [path.stem for path in made] == ["layer_timeline", "path_balance"]


def test_report_writes_what_is_asked_for(recorded, tmp_path):
    _, path = recorded
    asked = {"--csv": "a.csv", "--json": "a.json", "--trace": "t.json", "--plots": "pictures"}
    assert main(["report", str(path), *(word for name, value in asked.items() for word in (name, str(tmp_path / value)))]) == 0
    assert all((tmp_path / name).exists() for name in asked.values())
    assert json.loads((tmp_path / "a.json").read_text())["findings"] == []
