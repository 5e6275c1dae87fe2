"""Imports point one way: each room imports only what the design allows, seen from the syntax trees."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STDLIB = set(sys.stdlib_module_names)

#: room (path prefix) -> what it may import beside the standard library and itself; the longest matching prefix counts
ALLOWED = {
    "apexk/": set(),
    "apexk/config.py": {"apexk.policy", "apexk.hardware", "apexk.store.capacity"},
    "apexk/nvtx.py": {"nvtx"},
    "apexk/hardware/": set(),
    "apexk/policy/": set(),
    "apexk/policy/predictor.py": {"numpy"},
    "apexk/predictors/": {"numpy", "torch", "apexk.policy", "apexk.sim"},
    "apexk/timeline/": set(),
    "apexk/kernels/": set(),
    "kernels/triton/": {"torch", "triton"},
    "kernels/cpu/": {"torch", "numpy"},
    "kernels/cuda/": {"torch", "apexk.kernels.triton", "apexk.kernels.aot"},
    "kernels/aot/": {"torch", "triton", "apexk.kernels.triton"},
    "kernels/bench/": {"torch", "numpy", "apexk.kernels", "apexk.timeline"},
    "apexk/store/": {"torch", "apexk.kernels"},
    "apexk/device/": {"torch", "apexk.kernels", "apexk.store", "apexk.timeline", "apexk.nvtx", "apexk.hardware"},
    "apexk/device/cuda_runtime.py": {"torch", "cupy", "apexk.kernels.cuda"},
    "apexk/engine/": {"torch", "apexk.policy", "apexk.store", "apexk.device", "apexk.timeline", "apexk.nvtx"},
    "apexk/hf/": {"torch", "transformers", "apexk.kernels", "apexk.config", "apexk.engine", "apexk.policy", "apexk.store", "apexk.device", "apexk.timeline",
                  "apexk.hardware", "apexk.nvtx"},
    "apexk/hf/loader/": {"torch", "transformers", "tqdm", "apexk.config", "apexk.store", "apexk.hardware", "apexk.machine"},
    "apexk/machine/": set(),
    "apexk/fit/": {"torch", "transformers", "apexk.config", "apexk.hf", "apexk.sim", "apexk.testing", "apexk.machine", "apexk.store", "apexk.hardware"},
    "apexk/bench/": {"torch", "transformers", "fastapi", "pyarrow", "accelerate", "apexk.hf", "apexk.config", "apexk.demo", "apexk.testing"},
    "apexk/demo/": {"torch", "transformers", "tokenizers", "apexk.hf", "apexk.config", "apexk.hardware", "apexk.policy"},
    "apexk/testing/": {"torch", "transformers", "numpy", "apexk.sim", "apexk.hf", "apexk.config", "apexk.engine", "apexk.policy", "apexk.store", "apexk.device"},
    "apexk/overhead/": {"torch", "apexk.engine", "apexk.policy", "apexk.store", "apexk.device", "apexk.timeline", "apexk.hardware"},
    "apexk/sim/": {"numpy", "apexk.config", "apexk.engine", "apexk.policy", "apexk.store", "apexk.device", "apexk.timeline", "apexk.hardware"},
    "apexk/sim/inspect.py": {"numpy", "matplotlib"},
    "apexk/sim/importers.py": {"numpy", "pyarrow"},
    "apexk/paper/draw.py": {"matplotlib"},
    "apexk/paper/": {"apexk.sim", "apexk.engine", "apexk.policy", "apexk.hardware", "apexk.config", "apexk.timeline"},
    "apexk/compare/": {"numpy", "matplotlib", "apexk.sim", "apexk.policy", "apexk.timeline", "apexk.hardware", "apexk.profiling"},
    "apexk/cli/": {"apexk", "torch", "transformers"},
    "profiling/": {"numpy", "apexk.timeline", "apexk.profiling"},
    **dict.fromkeys(("profiling/plot.py", "profiling/pictures.py", "profiling/style.py", "profiling/roofline.py"), {"numpy", "matplotlib", "apexk.timeline", "apexk.profiling"}),
    "profiling/gpu_suite/": {"torch", "triton", "apexk"},
}
#: of the standard library alone, for every room
ANYWHERE = {"apexk.arguments", "apexk.inputs", "apexk.outputs", "apexk.workers"}
#: packages that one file alone may import
ONLY_IN = {"nvtx": "apexk/nvtx.py", "cupy": "apexk/device/cuda_runtime.py"}


def sources() -> list[Path]:
    return sorted(p for room in ("apexk", "kernels", "profiling") for p in (ROOT / room).rglob("*.py") if "__pycache__" not in p.parts)


def imports(path: Path) -> list[tuple[str, int]]:
    """(absolute module, line) of every import in a file, those inside functions included."""
    found = []
    package = list(path.relative_to(ROOT).with_suffix("").parts)
    package = (["apexk", *package] if package[0] in ("kernels", "profiling") else package)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from apexk import hardware` names the module apexk.hardware
            found += [(f"{module}.{a.name}", node.lineno) for a in node.names] if module == "apexk" else [(module, node.lineno)]
    return found


def home(path: Path) -> str:
    """The room's own dotted prefix."""
    parts = path.relative_to(ROOT).parts
    if parts[0] in ("kernels", "profiling"):
        return ".".join(("apexk", *parts[: 2 if parts[0] == "kernels" else 1]))
    return ".".join(parts[:2]) if len(parts) > 2 else "apexk"


def allowed_for(relative: str) -> set[str]:
    return ALLOWED[max((prefix for prefix in ALLOWED if relative.startswith(prefix)), key=len)]


def is_in(module: str, rooms) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    relative = str(path.relative_to(ROOT))
    allowed = allowed_for(relative)
    for module, line in imports(path):
        top = module.split(".")[0]
        own = home(path) != "apexk" and is_in(module, [home(path)])
        fine = top in STDLIB or own or module in ("apexk", "apexk.__version__", *ANYWHERE) or is_in(module, allowed)
        assert fine, f"{relative}:{line} imports {module}; its room may import {sorted(allowed) or 'the standard library'}"
        assert ONLY_IN.get(top, relative) == relative, f"{relative}:{line}: only {ONLY_IN[top]} imports {top}"


def test_no_file_is_over_400_lines():
    suffixes = {".py", ".cpp", ".h", ".cu"}
    long = {}
    for room in ("apexk", "kernels", "profiling", "tests"):
        for path in (ROOT / room).rglob("*"):
            if path.suffix in suffixes:
                lines = len(path.read_text(encoding="utf-8").splitlines())
                if lines > 400:
                    long[str(path.relative_to(ROOT))] = lines
    assert not long


def test_import_is_light():
    """`import apexk` needs no GPU and no Triton, loads no torch, and starts no thread."""
    code = (
        "import sys, threading\n"
        "for name in ('triton', 'cupy'): sys.modules[name] = None\n"
        "import apexk\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert threading.active_count() == 1\n"
        "assert len(__import__('os').listdir('/proc/self/task')) == 1\n"
        "apexk.swap; apexk.ApexConfig\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_kernels_folder_does_not_look_like_a_package():
    """With an `__init__.py` transformers would take our folder for Hugging Face's `kernels` package."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
