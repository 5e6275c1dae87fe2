"""`apexk doctor`: what there is to run on, and what every setting is and why."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version

import apexk
from apexk.cli import DONE
from apexk.cli.progress import gib
from apexk.hardware import load
from apexk.outputs import out_file, write_text

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "triton", "cupy", "nvtx", "accelerate", "pyarrow", "matplotlib")
OPTIONAL = {"cupy": "device 'cuda'", "triton": "GPU kernels", "nvtx": "ranges in Nsight", "accelerate": "comparing with its CPU offload",
            "pyarrow": "parquet files", "matplotlib": "pictures"}
#: environment variables that are read
VARIABLES = {"APEXK_CPU_ISA": "instruction set of the CPU kernels"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="a6000-paper", help="hardware file whose overrides count among the settings (default: a6000-paper)")
    parser.add_argument("--json", nargs="?", const="-", type=lambda text: text if text == "-" else out_file(text), metavar="OUT", help="as JSON on stdout, or into this file")


def run(args: argparse.Namespace) -> int:
    load(args.hardware)
    found = examine(args.hardware)
    text = json.dumps(found, indent=1)
    if args.json == "-":
        print(text)
        return DONE
    if args.json:
        write_text(args.json, text + "\n")
    print(show(found))
    return DONE


def examine(hardware: str = "a6000-paper") -> dict:
    """Everything that is known, as it goes into the JSON. `problems` lists what will not work, and what to do."""
    from apexk.machine import facts, memory

    problems: list[str] = []
    found = {
        "versions": {"apexk": apexk.__version__, "python": platform.python_version(), "system": platform.platform(), **{p: _version(p) for p in PACKAGES}},
        "processor": facts.processor(), "cpu_kernels": _kernels(problems),
        "memory": [{"limited_by": room.source, "free": room.free, "total": room.total} for room in memory.rooms()],
        "locked_memory": facts.locked_memory(), "transparent_huge_pages": facts.huge_pages(), "gpus": _gpus(problems), "settings": _settings(hardware),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }  # fmt: skip
    limit, memory_here = found["locked_memory"]["soft"], max((room["total"] for room in found["memory"]), default=0)
    if found["gpus"] and limit is not None and limit < memory_here:
        problems.append(f"only {gib(limit)} may be pinned, so copies to the GPU of larger models are slow: raise `ulimit -l` "
                        "(a container: --ulimit memlock=-1)")
    problems += [f"{name} is not installed: {use}" for name, use in OPTIONAL.items() if found["versions"][name] is None]
    return found | {"problems": problems}


def show(found: dict) -> str:
    """The findings as a person reads them."""
    lines = ["versions"]
    lines += [f"  {name:14}{value or '-'}" for name, value in found["versions"].items()]
    cpu, kernels, locked = found["processor"], found["cpu_kernels"], found["locked_memory"]
    lines += ["processor", f"  {cpu['model']}, {cpu['processors']} processors for this process; {' '.join(cpu['flags']) or 'none of the flags of interest'}"]
    if "isa" in kernels:
        others = ", ".join(f"{name}{'' if runs else ' (not here)'}" for name, runs in kernels["available"].items())
        lines += ["CPU kernels", f"  {kernels['isa']} ({kernels['source']}), {kernels['threads']} threads; there are {others}"]
    lines.append("memory")
    lines += [f"  {gib(room['free'])} free of {gib(room['total'])}, says {room['limited_by']}" for room in found["memory"]]
    lines.append(f"  may be pinned: {'no limit' if locked['soft'] is None else gib(locked['soft'])} (ulimit -l); transparent huge pages: {found['transparent_huge_pages']}")
    lines.append("GPUs" if found["gpus"] else "GPUs: none that torch can use")
    for gpu in found["gpus"]:
        link = gpu["link"]
        lines.append(f"  {gpu['name']}, compute capability {gpu['capability']}, {gib(gpu['free'])} free of {gib(gpu['total'])}, link "
                     f"{link['current_link_speed']} x{link['current_link_width']} (at most {link['max_link_speed']} x{link['max_link_width']})")
    lines.append("settings")
    lines += [f"  {name:18}{setting['value']!s:14}{setting['source']}" for name, setting in found["settings"].items()]
    lines += [f"  {name:18}{value or '-':14}environment: {VARIABLES[name]}" for name, value in found["environment"].items()]
    lines += ["problems" if found["problems"] else "no problems"] + [f"  {text}" for text in found["problems"]]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    for name in (package, f"{package}-cuda12x", f"{package}-cuda13x"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _kernels(problems: list[str]) -> dict:
    """The instruction set that would be used, and why; what else the library has."""
    try:
        from apexk.kernels.cpu import library
        from apexk.kernels.cpu.ffn import HostFFN

        available = library.isa_names()
        with HostFFN(threads=1) as ffn:
            isa = ffn.isa
        source = "APEXK_CPU_ISA" if os.environ.get("APEXK_CPU_ISA") else "the best that this machine runs"
        return {"isa": isa, "source": source, "threads": library.machine().threads, "available": available}
    except (ImportError, OSError, ValueError) as error:
        problems.append(f"CPU kernels: {error}")
        return {}


def _gpus(problems: list[str]) -> list[dict]:
    import torch

    from apexk.machine import facts

    found = []
    try:
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            about = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            bus = f"{getattr(about, 'pci_domain_id', 0):04x}:{getattr(about, 'pci_bus_id', 0):02x}:{getattr(about, 'pci_device_id', 0):02x}.0"
            found.append({"name": about.name, "capability": f"{about.major}.{about.minor}", "free": free, "total": total, "pci": bus, "link": facts.link(bus)})
    except RuntimeError as error:
        problems.append(f"GPU: {error}")
    return found


def _settings(hardware: str) -> dict:
    """Each field of a default `ApexConfig` with its value and source."""
    from apexk.config import ApexConfig

    config = ApexConfig(hardware=hardware)
    chosen = config.settings(load(hardware))
    plain = {f.name: {"value": getattr(config, f.name), "source": "default"} for f in fields(config) if f.name not in chosen}
    return plain | {name: {"value": s.value, "source": s.source} for name, s in chosen.items()}
