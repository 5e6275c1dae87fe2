"""The command line as a person uses it: what it prints, what it writes, how it ends."""

import argparse
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from apexk import cli
from apexk.kernels.cpu import library
from apexk.policy.registry import POLICIES
from apexk.timeline import read

ROW = {"tpot_ms", "tokens_per_s", "cpu_path_ms", "gpu_path_ms", "exact", "speculative", "hit_rate", "wasted"}


def run(*words):
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as ended:  # argparse's, for a bad flag
        return ended.code


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One small demo: (its exit code, standard output and standard error, its folder)."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["demo", "--prompts", "3", "--tokens", "5", "--pool", "6", "--out", folder / "out", "--json", folder / "out.json"]
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
        code = run(*words)
    return (code, out.getvalue(), error.getvalue()), folder


def test_demo_shows_and_writes(demo):
    (code, out, error), folder = demo
    assert code == 0, error
    assert "tokens identical: 3/3 prompts, 15 tokens (float32)" in out
    assert "modelled on hardware a6000-paper, timed as if each expert were that file's" in out
    assert all(name in out for name in ("no_assign", "sa_only", "ea_only", "apex"))
    assert "generating" in error, "progress goes to stderr"
    assert (folder / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((folder / "out.json").read_text())
    assert json.loads((folder / "out" / "summary.json").read_text()) == result
    assert result["tokens_identical"] is True and result["prompts"] == 3 and result["device"] == "virtual"
    assert set(result["policies"]) == {"no_assign", "sa_only", "ea_only", "apex"}
    assert all(set(row) == ROW for row in result["policies"].values())
    assert {"hardware", "versions"} <= set(result)


def test_demo_table_follows_from_the_timeline(demo):
    """The table's Apex row, recomputed from the rows of `timeline.jsonl`."""
    _, folder = demo
    rows = read(folder / "out" / "timeline.jsonl").rows
    apex = json.loads((folder / "out.json").read_text())["policies"]["apex"]
    decode = [r for r in rows if r["phase"] == "decode"]
    steps = sorted({r["step"] for r in decode})
    ends = {s: max(r["end_ns"] for r in rows if r["step"] == s and r["kind"] == "combine") for s in [steps[0] - 1, *steps]}
    tpot = (ends[steps[-1]] - ends[steps[0] - 1]) / len(steps) / 1e6
    assert apex["tpot_ms"] == pytest.approx(tpot, rel=1e-9)
    assert apex["tokens_per_s"] == pytest.approx(3 * 1e3 / tpot, rel=1e-9)
    assert apex["exact"] == sum(r["kind"] == "copy.exact" for r in decode)
    assert apex["speculative"] == sum(r["kind"] == "copy.spec" for r in decode)
    routed = {(r["step"], r["layer"]): r["end_ns"] for r in decode if r["kind"] == "route"}
    cpu = [r["end_ns"] - routed[r["step"], r["layer"]] for r in decode if r["kind"] == "host.ffn"]
    assert apex["cpu_path_ms"] == pytest.approx(sum(cpu) / len(cpu) / 1e6, rel=1e-9)


def test_report_of_the_demo(demo, capsys, tmp_path):
    _, folder = demo
    assert run("report", folder / "out" / "timeline.jsonl", "--phase", "decode", "--json", tmp_path / "r.json", "--plot", tmp_path / "r.png") == 0
    assert "decode" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text()) and (tmp_path / "r.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["demo", "--pool", "33"], 2, "0..32"),
        (["demo", "--pool", "-1"], 2, "pool"),
        (["demo", "--policies", "best"], 2, "apex"),
        (["demo", "--policies", ","], 2, "--policies"),
        (["demo", "--hardware", "h900"], 2, "a6000-paper"),
        (["demo", "--prompts", "0"], 2, "prompts"),
        (["demo", "--prompts", "100000"], 2, "held-out"),
        (["demo", "--tokens", "0"], 2, "tokens"),
        (["report", "nothing.jsonl"], 2, "nothing.jsonl"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) else "",
)
def test_bad_input_is_named(words, code, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == code
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


@pytest.mark.parametrize("words", [[], ["dance"], ["demo", "--colour"]])
def test_misuse(words, capsys):
    assert run(*words) == 2
    assert "usage: apexk" in capsys.readouterr().err


def test_help_of_every_verb(capsys):
    for verb in cli.VERBS:
        assert run(verb, "--help") == 0
    assert "pool" in capsys.readouterr().out


def test_every_flag_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setattr(argparse.ArgumentParser, "format_help", lambda self: "\n".join(a.dest for a in self._actions if not a.help and a.dest != "action"))
    for verb in cli.VERBS:
        assert run(verb, "--help") == 0
        assert not capsys.readouterr().out.strip(), verb
    for action in ("generate", "stats", "popularity", "import", "record", "export"):
        assert run("trace", action, "--help") == 0
        assert not capsys.readouterr().out.strip(), action


def test_an_unbuilt_checkout_says_so(monkeypatch, capsys):
    """A library's own words; the interpreter's about a name that is missing stay a traceback."""
    monkeypatch.setattr(cli, "module", lambda verb: library.load(Path("nowhere.so")))
    assert run("policies") == cli.LACKING
    assert "are not built" in capsys.readouterr().err
    monkeypatch.setattr(cli, "module", lambda verb: exec("from apexk.policy import nothing"))
    with pytest.raises(ImportError, match="nothing"):
        run("policies")


def test_all_policies_are_those_that_the_settings_suit(capsys):
    words = ("simulate", "--policy", "all", "--steps", "2", "--warmup", "1", "--no-references", "--jobs", "1", "--batch", "1", "--pool", "8")
    assert run(*words, "--set", "pool_scope=global") == 0
    told = capsys.readouterr()
    assert "leaves out" in told.err and "post_fetch" in told.err
    shown = {line.split()[0] for line in told.out.splitlines() if "mmlu-like" in line}
    assert shown == {name for name, made in POLICIES.items() if "global" in made.pool_scopes}


def test_policies_lists_them_all(capsys):
    from apexk.policy import names

    assert run("policies") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in names())


def test_verbs_are_files():
    folder = Path(cli.__file__).parent
    shared = {"__init__", "__main__", "flags", "progress"}
    assert {p.stem for p in folder.glob("*.py")} - shared == {verb.replace("-", "_") for verb in cli.VERBS}


def test_a_kernel_rooms_help_names_its_modes(capsys):
    from apexk.cli.kernels import MODES

    for room, modes in MODES.items():
        assert run("kernels", room, "--help") == 0
        told = capsys.readouterr().out
        assert all(f"--{mode} " in told for mode in modes)


def test_kernel_benchmarks_without_a_gpu(capsys):
    import torch

    assert run("kernels", "bench", "--list") == 0
    assert "moe_ffn" in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert run("kernels", "bench", "--device", "cuda") == 3
        assert "CUDA" in capsys.readouterr().err


#: a line a command; E is a folder without a configuration, B one with a broken one, T a prompt. What is wrong is told in a second
TOLD_AT_ONCE = """
run x --tokens 0 | run x --policy best | run x --model /none | run x --model E | run x --model B | run x --model random:gpt-9 | run x --model random:olmoe-1b-7b-0924 --layers 99
run x --layers 2 | run --file /none.txt | run x y --trace a.npz --batch 1 | run x --temperature 0.5 | chat --device tpu | chat --model /none | chat --model random:gpt-9
serve --port 0 | serve --model /none | serve --model B | serve --chat-template /none | bench --batch 0 | bench --policies best | bench --pools some | bench --hardware h900
bench --model /none | bench --model B | bench --model random:gpt-9 | bench --plain fast | bench --dtype int8 | bench --vocabulary 9 | bench --workload /none
fit /none | fit E | fit B | fit olmoe-1b-7b-0924 --hardware h900 | fit olmoe-1b-7b-0924 --gpu-memory x | fit olmoe-1b-7b-0924 --gpu-memory 3
plan /none | plan E | plan B | plan olmoe-1b-7b-0924 --systems x | plan olmoe-1b-7b-0924 --machine x | plan olmoe-1b-7b-0924 --host-memory x | plan olmoe-1b-7b-0924 --popularity /none
profile --model /none | profile --model B | profile --policy best | profile --device tpu | profile --hardware h900 | trace record o.npz --model E --prompts T | trace record o.npz --prompts /none
trace record o.npz --policy best | trace generate o.npz --model x | trace generate o.npz --preset x | trace stats /none | demo --policies best | demo --hardware h900 | demo --device tpu
payload --payload x | payload --policy best | overhead --policy best | simulate --policy best | simulate --hardware h900 | simulate --preset x | simulate --model x | simulate --trace /none
simulate --set x=1 | simulate --popularity /none | compare --systems best | compare --hardware h900 | compare --preset x | compare --model x | compare --trace /none
evictions --preset x | evictions --model x | evictions --hardware h900 | explain --policy best --step 0 --layer 0 | explain --hardware h900 --step 0 --layer 0
explain --trace /none --step 0 --layer 0 | explain --timeline /none --step 0 --layer 0 | explain --preset x --step 0 --layer 0 | train-predictor /none | report /none | doctor --hardware h900
"""
AT_ONCE = """import sys
from apexk.cli import main
for line in sys.argv[1:]:
    try:
        code = main(line.split())
    except SystemExit as ended:
        code = ended.code
    assert code == 2, (line, code)
    assert not {"torch", "transformers"} & set(sys.modules), line
"""


def test_bad_words_are_refused_without_torch(tmp_path):
    for folder, text in (("E", None), ("B", "[1]")):
        (tmp_path / folder).mkdir()
        if text:
            (tmp_path / folder / "config.json").write_text(text)
    (tmp_path / "T").write_text("In the beginning")
    lines = [line.strip() for line in TOLD_AT_ONCE.replace("\n", "|").split("|") if line.strip()]
    done = subprocess.run([sys.executable, "-c", AT_ONCE, *lines], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-500:]
    assert "Traceback" not in done.stderr


def test_a_timeline_nested_too_deep_is_named(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text("[" * 100_000 + "\n")
    assert run("report", tmp_path / "t.jsonl") == cli.MISUSE
    assert "t.jsonl, line 1" in capsys.readouterr().err
