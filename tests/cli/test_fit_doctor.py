"""`apexk fit` and `apexk doctor`, and the cache's bytes that the former is told."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig

from apexk.cli import DONE, LACKING, MISUSE, main
from apexk.fit import fit as module
from apexk.hf.inspect import find_experts
from apexk.hf.kv import kv_bytes
from apexk.hf.loader.skeleton import skeleton
from apexk.machine import facts, memory
from apexk.testing.tiny import CONFIGS, tiny, tiny_config

GIB = 1 << 30


def held(thing, depth=6) -> dict:
    """Every tensor below an object, by identity."""
    if isinstance(thing, torch.Tensor):
        return {id(thing): thing}
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    return {key: t for part in inner for key, t in held(part, depth - 1).items()} if depth else {}


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_bytes_of_the_cache_are_the_librarys(model_type):
    """A real pass of a tiny model over 200 tokens, past every sliding window, against shapes alone."""
    config = tiny_config(model_type)
    with torch.no_grad():
        cache = tiny(model_type, dtype=torch.bfloat16)(torch.full((2, 200), 5), use_cache=True).past_key_values
    wanted = sum(t.numel() * t.element_size() for t in held(cache).values())
    like = skeleton(config, torch.bfloat16)
    assert kv_bytes(like, find_experts(like), 2, 200) == wanted > 0


@pytest.fixture
def roomy(monkeypatch):
    monkeypatch.setattr(memory, "rooms", lambda root=None: [memory.Room("a test", 100 * GIB, 128 * GIB)])


def ask(tmp_path, *arguments, code=DONE):
    assert main(["fit", *map(str, arguments), "--json", str(tmp_path / "fit.json")]) == code
    return json.loads((tmp_path / "fit.json").read_text())


def test_fit_of_a_known_shape(tmp_path, roomy, capsys, monkeypatch):
    monkeypatch.setattr(module, "STEPS", 4)
    monkeypatch.setattr(module, "WARMUP", 1)
    r = ask(tmp_path, "qwen3.5-35b-a3b", "--gpu-memory", "48GiB", "--context", 4096, "--batch", 2)
    assert r["model"]["bytes_per_expert"] == 6 << 20 and r["host"]["experts"] == 60 * GIB and r["host"]["fits"]
    # ten layers of full attention, 2 heads of 256 wide keys and values in bfloat16; the states of the other thirty are small
    attention = 2 * 4096 * 10 * 2 * 2 * 256 * 2
    assert attention < r["gpu"]["kv_cache"] < attention + 200 * 2**20
    kept = sum(r["gpu"][name] for name in ("dense", "kv_cache", "expert_rows", "activations_and_libraries"))
    slots = r["suggested"]["pool"]
    assert kept + slots * 40 * (6 << 20) <= 48 * GIB < kept + (slots + 1) * 40 * (6 << 20)
    assert [row["pool"] for row in r["pools"]] == sorted({0, 8, 64, 128, 256, slots})
    assert [row["fits"] for row in r["pools"]] == [row["pool"] <= slots for row in r["pools"]]
    assert all(speed > 0 for row in r["pools"] for speed in row["tokens_per_s"].values()) and r["modelled"]
    assert "modelled on a6000-paper" in capsys.readouterr().out


def test_fit_of_a_checkpoint_reads_headers_alone(tmp_path, capsys, monkeypatch):
    """The tensors' bytes are holes: their headers are all that there is to read."""
    monkeypatch.setattr(module, "STEPS", 4)
    monkeypatch.setattr(module, "WARMUP", 1)
    model = tiny("mixtral", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    file = tmp_path / "m/model.safetensors"
    size, header = file.stat().st_size, 8 + int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as stream:
        stream.truncate(header)
        stream.truncate(size)
    r = ask(tmp_path, tmp_path / "m")
    experts = sum(p.nbytes for n, p in model.named_parameters() if ".experts." in n)
    assert r["host"]["dense"] == sum(p.nbytes for p in model.parameters()) - experts
    assert r["checkpoint"]["bytes"] == sum(p.nbytes for p in model.parameters()) and r["checkpoint"]["expert_tensors"] == 4 * 8 * 3
    assert r["suggested"]["device"] == "cpu" or torch.cuda.is_available()


def test_fit_says_when_the_host_is_too_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "WARMUP", 1)
    monkeypatch.setattr(memory, "rooms", lambda root=None: [memory.Room("the control group", GIB, 2 * GIB)])
    r = ask(tmp_path, "olmoe-1b-7b-0924", "--gpu-memory", "48GiB", code=LACKING)
    assert not r["host"]["fits"] and r["host"]["limited_by"] == "the control group"
    assert "pool" not in r["suggested"] and r["suggested"]["host_bytes"] == r["host"]["needed"]
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out and f"suggested: a host with {r['host']['needed'] / GIB:.2f} GiB" in out


def test_fit_from_a_configuration_without_weights(tmp_path, roomy, monkeypatch, capsys):
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "WARMUP", 1)
    AutoConfig.for_model("olmoe", intermediate_size=1024, num_hidden_layers=2).save_pretrained(tmp_path / "c")
    assert ask(tmp_path, tmp_path / "c")["checkpoint"] is None


@pytest.mark.parametrize(("arguments", "said"), [
    (["no-such-model"], "qwen3.5-35b-a3b"),
    (["olmoe-1b-7b-0924", "--gpu-memory", "48"], "--gpu-memory"),
    (["olmoe-1b-7b-0924", "--gpu-memory", "48zz"], "--gpu-memory"),
    (["olmoe-1b-7b-0924", "--gpu-memory", "0GiB"], "--gpu-memory"),
    (["olmoe-1b-7b-0924", "--hardware", "none"], "no hardware file"),
])  # fmt: skip
def test_fit_of_nonsense(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["fit", *arguments]))
    assert ended.value.code == MISUSE
    assert said in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("words", [["fit", "qwen3.5-35b-a3b"], ["plan", "qwen3.5-35b-a3b"], ["payload", "--payload", "plain", "--pass-tokens", "8", "--tokens", "20"]], ids=" ".join)
def test_the_librarys_warnings_are_not_the_askers(words):
    """In a process of its own: the library says each but once."""
    code = f"import sys\nfrom apexk.fit import fit\nfit.STEPS, fit.WARMUP = 2, 1\nfrom apexk.cli import main\nmain({words!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout and [line for line in done.stderr.splitlines() if not line.startswith("payload: ")] == []


def test_doctor(capsys, monkeypatch, tmp_path):
    assert main(["doctor", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu_kernels"]["available"][found["cpu_kernels"]["isa"]]
    assert found["memory"] and found["settings"]["utility_decay"] == {"value": 0.5, "source": "hardware file a6000-paper"}
    assert found["settings"]["policy"] == {"value": "apex", "source": "default"}
    monkeypatch.setenv("APEXK_CPU_ISA", "scalar")
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == DONE
    again = json.loads((tmp_path / "d.json").read_text())
    assert (again["cpu_kernels"]["isa"], again["cpu_kernels"]["source"]) == ("scalar", "APEXK_CPU_ISA")
    assert "CPU kernels\n  scalar (APEXK_CPU_ISA)" in capsys.readouterr().out


def test_doctor_names_what_is_broken(capsys, monkeypatch):
    monkeypatch.setenv("APEXK_CPU_ISA", "mmx")
    assert main(["doctor"]) == DONE
    assert "CPU instruction set 'mmx'" in capsys.readouterr().out


def test_facts_from_files(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor : 0\nmodel name : A\nflags : fpu avx2 amx_bf16\n\nprocessor : 1\nmodel name : A\nflags : fpu avx2 amx_bf16\n")
    assert facts.processor(tmp_path)["flags"] == ["avx2", "amx_bf16"] and facts.processor(tmp_path)["model"] == "A"
    folder = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    assert facts.link("0000:3B:00.0", tmp_path)["current_link_speed"] == "16.0 GT/s PCIe"
    assert facts.link("0000:3B:00.0", tmp_path)["max_link_width"] is None
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never\n")
    assert facts.huge_pages(tmp_path) == "madvise"
