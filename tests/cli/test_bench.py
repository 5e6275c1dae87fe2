"""`apexk bench`: its figures follow from the samples, every arm is fed the same tokens, and what is modelled says so."""

import csv
import json

import pytest
import torch

from apexk import cli
from apexk.bench import prompts, workload
from apexk.bench.arms import arms
from apexk.bench.bench import Plan, bench
from apexk.bench.measure import Sample, figures, greedy_trace, run
from apexk.bench.source import Source
from apexk.config import ApexConfig
from apexk.testing.tiny import tiny


def code_of(*words):
    try:
        return cli.main(list(words))
    except SystemExit as ended:  # argparse's, for a bad flag
        return ended.code


@pytest.fixture
def source():
    return Source(tiny("qwen3_moe"), None, "tiny", random=True)


def test_figures_follow_from_the_samples():
    found = figures([Sample(100.0, [10.0, 20.0]), Sample(300.0, [30.0, 40.0]), Sample(200.0, [50.0])], batch=4, prompt_tokens=64)
    assert found["ttft_ms"] == pytest.approx({"p10": 120.0, "p50": 200.0, "p90": 280.0})
    assert found["prefill_tokens_per_s"] == pytest.approx(320.0)
    assert found["tpot_ms"]["p50"] == pytest.approx(30.0) and found["decode_tokens_per_s"] == pytest.approx(1e3 * 4 / 30)


def test_steps_are_the_models_own(source):
    """The loop's logits, teacher-forced, are those of one pass over prompt and trace, left padding included."""
    model, batch = source.model, workload.synthetic(128, 2, 6, 0)
    batch["attention_mask"][1, :3] = 0
    trace, seen, real = greedy_trace(model, batch, 5), [], model.forward

    def spy(*args, **kwargs):
        out = real(*args, **kwargs)
        seen.append(out.logits[:, -1])
        return out

    model.forward = spy
    assert len(run(model, batch, trace).step_ms) == 5
    assert torch.equal(torch.stack(seen[:-1], 1).argmax(-1), trace), "a greedy answer is what it is fed"


def test_every_arm_gets_the_same_tokens_in_turns(source):
    model, fed = source.model, []
    hook = model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: fed.append(args[0].clone()))
    chosen = arms(ApexConfig(), ["apex", "no_assign"], [2, 4], ["eager", "grouped_mm"])
    result = bench(source, chosen, Plan([2], [6], 3, repeats=2), lambda _: None)
    hook.remove()
    passes = [torch.cat(fed[i + 3 : i + 7], 1) for i in range(len(fed) - 7 * 12, len(fed), 7)]  # after a warm-up of three
    assert len(passes) == 12 and all(torch.equal(p, passes[0]) for p in passes)
    rows = {row["arm"]: row for row in result["rows"]}
    assert list(rows) == ["apex/pool=2", "apex/pool=4", "no_assign/pool=2", "no_assign/pool=4", "hf/eager", "hf/grouped_mm"]
    assert [row["modelled"] for row in rows.values()] == [True] * 4 + [False] * 2
    assert rows["apex/pool=2"]["hardware"] == "a6000-paper" and rows["hf/eager"]["hardware"] == "this machine, measured"
    decode = rows["apex/pool=4"]["decode"]  # one turn: a warm-up of two steps and three more
    assert decode["steps"] == 5 and rows["apex/pool=4"]["tpot_ms"]["p50"] < decode["step_ms"]
    assert not [n for n, m in model.named_modules() if "forward" in vars(m)]


def test_command_line(tmp_path, capsys):
    words = ["bench", "--device", "cpu", "--batch", "1,2", "--prompt", "8", "--tokens", "3", "--repeats", "1", "--plain", "grouped_mm,accelerate",
             "--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv"]  # fmt: skip
    assert cli.main([str(w) for w in words]) == 0
    told, out = json.loads((tmp_path / "b.json").read_text()), capsys.readouterr()
    assert told["schema"] == "apexk.e2e/1", "the kernels' benchmark rows are apexk.bench/1"
    assert [(r["batch"], r["arm"]) for r in told["rows"]] == [(1, "apexk"), (1, "hf/grouped_mm"), (2, "apexk"), (2, "hf/grouped_mm")]
    assert not any(r["modelled"] for r in told["rows"]) and "modelled" not in out.out and "accelerate: left out" in out.out
    with (tmp_path / "b.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [float(r["ttft_ms_p50"]) for r in rows] == [r["ttft_ms"]["p50"] for r in told["rows"]]
    for row in told["rows"]:
        assert row["decode_tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["tpot_ms"]["p50"])


@pytest.mark.parametrize(("words", "said"), [(["--pools", "4,999"], "pool is 999 slots per layer"), pytest.param(
    ["--device", "cuda"], "CUDA", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU"))])
def test_what_an_arm_refuses_is_told_before_anything_is_timed(words, said, capsys):
    assert code_of("bench", "--repeats", "1", *words) in (2, 3)
    err = capsys.readouterr().err
    assert said in err and "the plain model's answer" not in err


def test_beams_throughput_and_a_workload(tmp_path, capsys):
    (tmp_path / "mmlu").mkdir()
    (tmp_path / "mmlu" / "law_test.csv").write_text('"Who, then, is he?",a king,a lamb,a tree,a stone,B\nWhat is it?,one,two,three,four,A\n')
    words = ["bench", "--workload", tmp_path / "mmlu", "--tokens", 2, "--repeats", 1, "--beams", 2, "--pools", "2", "--throughput", "--json", tmp_path / "b.json"]
    assert cli.main([str(w) for w in words]) == 0
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert [r["batch"] for r in rows] == [1, 2] and sum(r.get("best", False) for r in rows) == 1
    assert "modelled: on hardware a6000-paper" in capsys.readouterr().out


def test_workload_files(tmp_path):
    asked = "Why?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"
    (tmp_path / "a.csv").write_text("Why?,1,2,3,4,C\n")
    (tmp_path / "b.csv").write_text("question,A,B,C,D,answer\nWhy?,1,2,3,4,C\n")
    (tmp_path / "c.jsonl").write_text('{"question": "Why?", "choices": [1, 2, 3, 4], "answer": 2}\n"plain"\n\n{"prompt": "p"}\n{"text": "t"}\n')
    (tmp_path / "d.txt").write_text("one\n\ntwo\n")
    assert prompts.read_prompts(tmp_path) == [asked, asked, asked, "plain", "p", "t", "one", "two"]


def test_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"question": ["Why?"], "choices": [["1", "2", "3", "4"]], "answer": [2]}), tmp_path / "test.parquet")
    assert prompts.read_prompts(tmp_path / "test.parquet") == ["Why?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:"]


def test_parquet_without_its_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    assert cli.main(["bench", "--workload", str(tmp_path / "t.parquet")]) == 3
    assert "pip install pyarrow" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.csv", "one,two\n", "a.csv:1: 2 columns"), ("a.jsonl", "{\n", "a.jsonl:1: no JSON"), ("a.jsonl", '{"x": 1}\n', "a.jsonl:1: wanted prompt"),
    ("a.jsonl", "[" * 100_000 + "\n", "a.jsonl:1: no JSON"), ("a.txt", "\n", "no prompt"), ("a.doc", "x", "unknown kind"),
])  # fmt: skip
def test_bad_workloads(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        prompts.read_prompts(tmp_path / name)


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--batch", "0"], 2, "batch"), (["--batch", "many"], 2, "whole number"), (["--prompt", "300000"], 2, "context"), (["--repeats", "0"], 2, "repeats"),
    (["--tokens", "-1"], 2, "--tokens"), (["--plain", "fast"], 2, "grouped_mm"), (["--policies", ","], 2, "policies"), (["--policies", "best"], 2, "apex"),
    (["--pools", "40"], 2, "40"), (["--dtype", "int8"], 2, "bfloat16"), (["--workload", "/none.txt"], 2, "none.txt"), (["--workload", "/none"], 2, "no such file or folder"), (["--hardware", "h900"], 2, "a6000"),
    (["--json", "/nonexistent/b.json"], 2, "no folder"), (["--csv", "/tmp"], 2, "is a folder"),
    (["--vocabulary", "9"], 2, "random:SHAPE"), (["--beams", "0"], 2, "beams"), (["--threads", "0"], 2, "threads"), (["--device", "tpu"], 2, "virtual"),
], ids=str)  # fmt: skip
def test_bad_words(words, code, said, capsys):
    assert code_of("bench", *words) == code
    assert said in capsys.readouterr().err
