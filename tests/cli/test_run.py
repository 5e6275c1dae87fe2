"""`apexk run` and `apexk chat`: what they print is the unpatched model's answer."""

import io
import json

import pytest
import torch

from apexk import cli
from apexk.bench.session import Session
from apexk.demo import model as demo
from apexk.testing.tiny import tiny
from apexk.timeline import read

TEXTS = ["In the beginning God created", "And it came to pass", "Then said the king unto him, Go"]


def run(*words):
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as ended:  # argparse's, for a bad flag
        return ended.code


@pytest.fixture(scope="module")
def wanted():
    model, tokenizer = demo.load()
    alone = [tokenizer.decode(demo.generate(model, tokenizer, [text], 8)[0], skip_special_tokens=True) for text in TEXTS]
    together = tokenizer.batch_decode(demo.generate(model, tokenizer, TEXTS, 8), skip_special_tokens=True)
    return alone, together


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--pool", "3"], ["--policy", "no_assign", "--pool", "0"]], ids=" ".join)
def test_one_prompt_is_streamed(words, wanted, capsys):
    assert run("run", TEXTS[0], "--tokens", 8, *words) == 0
    out = capsys.readouterr()
    assert out.out.strip() == wanted[0][0].strip()
    assert "decode steps" in out.err and ("modelled on a6000-paper" in out.err) == ("cpu" not in words)


def test_a_batch_from_a_file_with_everything_written(wanted, tmp_path, capsys):
    (tmp_path / "p.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    names = [tmp_path / n for n in ("t.jsonl", "r.trace.npz", "o.json")]
    assert run("run", "--file", tmp_path / "p.txt", "--tokens", 8, "--pool", 4, "--timeline", names[0], "--trace", names[1], "--json", names[2]) == 0
    told = json.loads(names[2].read_text())
    assert told["prompts"] == TEXTS and told["answers"] == wanted[1]
    out = capsys.readouterr().out
    assert all(f"{text} >>{answer}" in out for text, answer in zip(TEXTS, wanted[1], strict=True))
    assert {row["step"] for row in read(names[0]).rows} == set(range(8))
    from apexk.sim.trace import read as read_trace

    assert read_trace(names[1]).experts == 32


def test_from_stdin(wanted, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXTS[1] + "\n"))
    assert run("run", "--tokens", 8, "--device", "cpu") == 0
    assert capsys.readouterr().out.strip() == wanted[0][1].strip()


def test_a_folder_is_loaded_and_the_chat_template_used(tmp_path, capsys):
    model, tokenizer = demo.load()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %} God"
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    answer = tokenizer.decode(demo.generate(model, tokenizer, ["In the beginning God"], 6)[0], skip_special_tokens=True)
    assert run("run", "In the beginning", "--chat", "--model", tmp_path, "--tokens", 6, "--device", "cpu") == 0
    assert capsys.readouterr().out.strip() == answer.strip()


def test_sampling_goes_by_the_seed(capsys):
    said = []
    for seed in (1, 1, 2):
        assert run("run", TEXTS[0], "--tokens", 8, "--device", "cpu", "--sample", "--seed", seed) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


def test_chat(wanted, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([TEXTS[0], "/stats", "/clear", "/help", "word " * 4000, TEXTS[1]]) + "\n"))
    assert run("chat", "--tokens", 8, "--device", "cpu") == 0
    out = capsys.readouterr()
    said = [["> " + TEXTS[0], *wanted[0][0].strip().split("\n")], ["> /stats"], ["> /clear"], ["> /help"], ["> " + "word " * 4000], ["> " + TEXTS[1], *wanted[0][1].strip().split("\n")]]
    assert [line.strip() for line in out.out.split("\n") if line.strip()] == [line.strip() for part in said for line in part]
    assert "no chat template" in out.err and "exceed the model's context" in out.err and "decode steps" in out.err and "no command /help" in out.err


@pytest.mark.parametrize(("typed", "shown"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_question_is_in_the_output_once(typed, shown, monkeypatch, capsys):
    """A terminal shows what is typed into it; everything else is written."""
    from apexk.cli import chat

    asked = []
    monkeypatch.setattr("builtins.input", lambda prompt="": (asked.append(prompt), "Who?")[1])
    monkeypatch.setattr("sys.stdin.isatty", lambda: typed, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: shown, raising=False)
    assert chat._ask() == "Who?"
    out = capsys.readouterr()
    both = typed and shown
    assert (asked, out.out, out.err) == (["> " if both else ""], "" if both else "> Who?\n", "> " if typed and not shown else "")


BAD = [
    (["run", ""], 2, "empty"),
    (["run", "x", "--tokens", "0"], 2, "tokens"),
    (["run", "x", "--batch", "0"], 2, "batch"),
    (["run", "x", "--temperature", "0", "--sample"], 2, "temperature"),
    (["run", "x", "--temperature", "0.5"], 2, "--sample"),
    (["run", "x", "--policy", "best"], 2, "apex"),
    (["run", "x", "--pool", "-1"], 2, "pool"),
    (["run", "x", "--pool", "33"], 2, "33"),
    (["run", "x", "--pool", "some"], 2, "pool"),
    (["run", "x", "--device", "tpu"], 2, "virtual"),
    (["run", "x", "--hardware", "h900"], 2, "a6000-paper"),
    (["run", "x", "--model", "/nonexistent"], 2, "config.json"),
    (["run", "x", "--model", "random:gpt-9"], 2, "qwen3.5-35b-a3b"),
    (["run", "x", "--layers", "2"], 2, "random:SHAPE"),
    (["run", "x", "--chat", "--device", "cpu"], 2, "chat template"),
    (["run", "x", "--file", "/none.txt"], 2, "one of them"),
    (["run", "--file", "/none.txt"], 2, "none.txt"),
    (["run", "x", "--timeline", "/nonexistent/t.jsonl"], 2, "nonexistent"),
    (["run", "x", "--json", "/nonexistent/x.json"], 2, "no folder /nonexistent"),
    (["run", "x", "y", "--trace", "a.npz", "--batch", "1", "--device", "cpu"], 2, "one batch"),
    (["run", "word " * 4000, "--device", "cpu"], 2, "exceed the model's context"),
    (["chat", "--tokens", "0"], 2, "tokens"),
    (["chat", "--policy", "best"], 2, "apex"),
]


@pytest.mark.parametrize(("words", "code", "said"), BAD, ids=lambda v: " ".join(v)[:50] if isinstance(v, list) else None)
def test_bad_words(words, code, said, capsys):
    assert run(*words) == code
    assert said in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_has_none(tmp_path, capsys):
    """The library would make one that knows no word."""
    from apexk.demo.model import load

    load()[0].save_pretrained(tmp_path)
    assert run("run", "x", "--model", tmp_path, "--device", "cpu") == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_a_failing_stream_is_raised_and_ends_its_thread(monkeypatch):
    import apexk
    from apexk.bench.source import open_model

    source = open_model("demo")
    with apexk.swap(source.model, apexk.ApexConfig(device="cpu")) as handle:
        session = Session(source, handle)
        good = "".join(session.stream(TEXTS[0], 4, do_sample=False))
        monkeypatch.setattr(handle._device, "combine", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(session.stream(TEXTS[0], 4, do_sample=False))
        monkeypatch.undo()
        assert "".join(session.stream(TEXTS[0], 4, do_sample=False)) == good
        stream = session.stream(TEXTS[0], 500, do_sample=False)
        next(stream)
        stream.close()  # the reader leaves: no thread may go on


BAD_CALLS = [
    (lambda m: m(torch.tensor([[999]])), (IndexError, RuntimeError), ""),
    (lambda m: m(inputs_embeds=torch.full((1, 3, 64), float("nan"))), ValueError, "NaN"),
    (lambda m: m.model.layers[1].mlp(torch.zeros(1, 3, 64, dtype=torch.bfloat16)), TypeError, "bfloat16 activations for torch.float32"),
    (lambda m: m.model.layers[1].mlp(torch.zeros(1, 3, 32)), ValueError, r"wanted \[..., T, 64\]"),
    (lambda m: m.model.layers[1].mlp(torch.zeros(64)), ValueError, r"wanted \[..., T, 64\]"),
    (lambda m: m.model.layers[1].mlp(torch.full((1, 3, 64), float("inf"))), ValueError, "not finite"),
]


@pytest.mark.parametrize(("call", "kind", "said"), BAD_CALLS)
@pytest.mark.parametrize("device", ["virtual", "cpu"])
def test_bad_tensors_leave_the_model_usable(call, kind, said, device):
    import apexk

    model, ids = tiny("qwen3_moe"), torch.arange(9)[None]
    with torch.no_grad():
        wanted = model(ids).logits
        with apexk.swap(model, apexk.ApexConfig(device=device)):
            with pytest.raises(kind, match=said):
                call(model)
            torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chosen", [-1, 8])
def test_experts_that_do_not_exist(chosen, monkeypatch):
    import apexk

    model, ids = tiny("qwen3_moe"), torch.arange(9)[None]
    with torch.no_grad(), apexk.swap(model, apexk.ApexConfig(pool=2)):
        wanted, gate = model(ids).logits, model.model.layers[2].mlp.gate
        real = type(gate).forward
        monkeypatch.setattr(gate, "forward", lambda x: (*real(gate, x)[:2], real(gate, x)[2].fill_(chosen)))
        with pytest.raises(ValueError, match="wanted 0..7"):
            model(ids)
        monkeypatch.undo()
        torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)
