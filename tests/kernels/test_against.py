"""Benchmarks beside others: which providers are timed, that their repeats alternate, and the ratios of one run."""

import json

import pytest
import torch

from apexk.kernels.bench import against, roofs, run, timing
from apexk.kernels.bench.against import add_ratios, choose, competitors
from apexk.kernels.bench.registry import Call, Case
from apexk.kernels.bench.timing import LEAST, TURN, host_times_ns


@pytest.fixture(autouse=True)
def fixed_roofs(monkeypatch):
    fixed = {"host_read": roofs.Roof("host_read", 10.0, "GB/s"), "host_fp32": roofs.Roof("host_fp32", 100.0, "GFLOP/s")}
    monkeypatch.setattr(roofs, "roof", lambda name, threads=None: fixed[name])


def case(provider, tokens=1, threads=1, device="cpu", raises=None, ran=None, error=0.0):
    def make(device):
        if raises:
            raise raises
        return Call(lambda: ran.append(provider) if ran is not None else None, lambda: error, 2000, 8000)

    return Case("ffn", provider, device, torch.bfloat16, {"tokens": tokens, "threads": threads}, make, isa=provider.removeprefix("cpu-"))


PROVIDERS = ("cpu-avx2", "torch-loop", "torch-grouped-mm", "torch-fp32")


@pytest.mark.parametrize("names, others", [
    ("torch", ["torch-loop"]),
    ("torch,grouped_mm,f32", ["torch-loop", "torch-grouped-mm", "torch-fp32"]),
    ("torch-loop,grouped_mm,vllm,sglang", ["torch-loop", "torch-grouped-mm"]),
])  # fmt: skip
def test_providers_by_name(names, others, monkeypatch):
    monkeypatch.setattr(against, "importable", lambda package: False)
    chosen, missing = choose([case(p) for p in PROVIDERS], names.split(","))
    assert [c.provider for c in chosen] == ["cpu-avx2", *others]
    assert missing == [name for name in names.split(",") if name in ("vllm", "sglang")]


def test_unknown_provider_is_refused_with_those_there_are():
    for providers in (PROVIDERS, ("triton", "torch")):  # what may be said does not depend on which cases are asked for
        with pytest.raises(ValueError, match="--against: jax not known here; known: f32, fp32, grouped_mm, loop, sglang, torch, .*vllm"):
            choose([case(p) for p in providers], ["torch", "jax"])
    with pytest.raises(ValueError, match="--against: none of these cases has grouped_mm, f32; they have sglang, torch, vllm; a pattern that names one provider"):
        choose([case(p) for p in ("triton", "torch")], ["torch", "grouped_mm", "f32"])


def test_competitors_do_the_same_work():
    cases = [case(p, tokens, threads) for tokens in (1, 2) for threads in (1, 2) for p in PROVIDERS]
    assert [len(group) for group in competitors(cases)] == [4] * 4
    assert all(len({(c.shape["tokens"], c.shape["threads"]) for c in group}) == 1 for group in competitors(cases))


def test_ratios_are_theirs_over_ours():
    rows = [dict(provider=p, p50_ns=t) for p, t in (("cpu-avx2", 2.0), ("cpu-scalar", 8.0), ("torch-loop", 4.0), ("torch-fp32", 6.0))]
    add_ratios(rows)
    assert [row["ratio_vs"] for row in rows] == [{"torch-loop": 2.0, "torch-fp32": 3.0}, {"torch-loop": 0.5, "torch-fp32": 0.75}, {}, {}]


def test_repeats_alternate():
    ran = []
    times = host_times_ns([lambda: ran.append("a"), lambda: ran.append("b")], 0.0)
    assert len(times[0]) == len(times[1]) >= LEAST
    turn = 1 + TURN
    assert "".join(ran).startswith("a" * turn + "b" * turn + "a" * turn)


def test_calls_that_take_seconds_count_once(monkeypatch):
    """The others go on; a slow one is not called again, whatever the budget."""
    ran, clock = [], iter(range(0, 10**12, 10**6))
    monkeypatch.setattr(timing, "LONG_NS", 5e6)
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock))

    def slow():
        ran.append("slow")
        for _ in range(9):
            next(clock)

    times = host_times_ns([slow, lambda: ran.append("fast")], 0.0)
    assert ran.count("slow") == 1 and times[0] == [10e6]
    assert len(times[1]) >= LEAST


def bench(monkeypatch, tmp_path, cases, *arguments):
    monkeypatch.setattr(run, "all_cases", lambda: cases)
    monkeypatch.setattr(run, "roofs_of", lambda device: [])
    path = tmp_path / "out.json"
    code = run.main(["--budget", "0", "--json", str(path), *arguments])
    return code, json.loads(path.read_text()) if path.exists() else None


def test_rows_of_chosen_tokens_and_threads(monkeypatch, tmp_path, capsys):
    cases = [case(p, tokens, threads) for tokens in (1, 2, 4) for threads in (1, 2) for p in PROVIDERS]
    code, report = bench(monkeypatch, tmp_path, cases, "--tokens", "1,2", "--threads", "2", "--against", "torch,f32")
    assert code == run.DONE and report["schema"] == "apexk.bench/1" and report["failed"] == []
    rows = report["rows"]
    assert [(r["tokens"], r["threads"], r["provider"]) for r in rows] == [
        (tokens, 2, p) for tokens in (1, 2) for p in ("cpu-avx2", "torch-loop", "torch-fp32")
    ]
    ours = rows[0]
    assert ours["isa"] == "avx2" and set(ours["ratio_vs"]) == {"torch-loop", "torch-fp32"} and rows[1]["ratio_vs"] == {}
    assert ours["gb_per_s"] == pytest.approx(8000 / ours["p50_ns"]) and ours["gflop_per_s"] == pytest.approx(2000 / ours["p50_ns"])
    assert ours["ratio_vs"]["torch-loop"] == pytest.approx(rows[1]["p50_ns"] / ours["p50_ns"])
    assert ours["command"] == "apexk kernels bench 'ffn/*/cpu/bf16/1/2' --against torch,f32"
    assert "x torch-loop" in capsys.readouterr().out


def test_sizes_that_no_case_has_are_misuse(monkeypatch, tmp_path, capsys):
    assert bench(monkeypatch, tmp_path, [case(p) for p in PROVIDERS], "--tokens", "3")[0] == run.MISUSE
    assert "--tokens: no case has [3]; there are 1" in capsys.readouterr().err
    assert bench(monkeypatch, tmp_path, [case(p) for p in PROVIDERS], "--against", "jax")[0] == run.MISUSE


def test_one_that_is_wrong_or_raises_leaves_the_others(monkeypatch, tmp_path, capsys):
    """A foreign package that raises fails nothing; a wrong result fails the run; neither is timed."""
    ran = []
    cases = [case("cpu-avx2"), case("torch-loop", error=1.0, ran=ran), case("vllm", raises=TypeError("changed"))]
    monkeypatch.setattr(against, "importable", lambda package: True)
    code, report = bench(monkeypatch, tmp_path, cases, "--against", "torch,vllm")
    assert code == run.FAILED and [r["provider"] for r in report["rows"]] == ["cpu-avx2"] and ran == ["torch-loop"]
    assert "vllm/cpu/bf16/1/1 is left out: TypeError: changed" in capsys.readouterr().err
    with pytest.raises(TypeError, match="ours"):
        run.measure([case("cpu-avx2", raises=TypeError("ours"))])


def test_no_case_starts_behind_its_time(monkeypatch, tmp_path, capsys):
    cases = [case(p, tokens) for tokens in (1, 2) for p in PROVIDERS]
    code, report = bench(monkeypatch, tmp_path, cases, "--within", "-1", "--against", "torch")
    assert code == run.DONE and report["rows"] == [] and report["left_out"] == 4
    assert "4 of 4 cases are left out" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_names_are_checked_and_nothing_runs(capsys):
    assert run.main(["--device", "cuda", "--against", "torch-loop,grouped_mm,vllm,sglang"]) == run.LACKING
    assert "need a CUDA device" in capsys.readouterr().err
