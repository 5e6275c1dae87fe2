"""Packaging: where the rooms stand in the package, and the native libraries (built by the rooms' own `build.py`)."""

import importlib.util
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
KERNEL_ROOMS = ["triton", "cpu", "cuda", "bench", "aot"]
NATIVE_ROOMS = {"apexk/device/native": ["_apexk_transfer", "_apexk_fake_cuda"], "apexk/policy/native": ["_apexk_policy"]}


def build_script(room: str):
    """A room's `build.py` loaded by its path: importing it through the package would need torch at build time."""
    spec = importlib.util.spec_from_file_location("apexk_build", ROOT / room / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Plain shared libraries loaded by ctypes: no Python.h, no torch or CUDA headers."""

    def build_extension(self, ext):
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        room = ext.name.rpartition(".")[0].replace(".", "/")
        if room in NATIVE_ROOMS:
            build_script(room).build(out.stem, out.parent)
        else:
            build_script("kernels/cpu").build(out.parent, Path(self.build_temp) / "cpu")

    def get_ext_filename(self, name):
        return name.replace(".", "/") + ".so"


class Wheel(bdist_wheel):
    """The native library depends on the machine but on no Python ABI."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


packages = find_packages(include=["apexk", "apexk.*"])
packages += [f"apexk.kernels.{room}" for room in KERNEL_ROOMS]
packages += ["apexk.profiling"] + [f"apexk.profiling.{p}" for p in find_packages("profiling")]

setup(
    name="apexk",
    version="0.1.0",
    description="Mixture-of-Experts inference with experts in host memory: adaptive CPU-GPU expert assignment (Apex)",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=packages,
    package_dir={
        "apexk": "apexk",
        **{f"apexk.kernels.{room}": f"kernels/{room}" for room in KERNEL_ROOMS},
        "apexk.profiling": "profiling",
    },
    package_data={
        "apexk.demo": ["data/*"],
        "apexk.device.native": ["src/*", "include/*"],
        "apexk.policy.native": ["src/*"],
        "apexk.hardware": ["*.json"],
        "apexk.paper": ["*.json"],
        "apexk.sim": ["samples/*"],
        "apexk.testing": ["*.json"],
        "apexk.kernels.aot": ["kept/*.jsonl"],
        "apexk.profiling": ["*.sh", "native/*.h"],
        "apexk.kernels.cpu": ["src/*", "include/*"],
        "apexk.kernels.cuda": ["*.cu", "cubin/*"],
    },
    install_requires=["torch>=2.11", "transformers>=5.17", "safetensors>=0.5", "numpy", "tqdm", "nvtx>=0.2.11"],
    extras_require={
        "triton": ["triton>=3.6"],
        "cuda12": ["triton>=3.6", "cupy-cuda12x"],
        "cuda13": ["triton>=3.6", "cupy-cuda13x"],
        "plots": ["matplotlib"],
        "parquet": ["pyarrow"],
        "serve": ["fastapi", "uvicorn", "openai", "rich"],
        "test": ["pytest", "hypothesis", "triton>=3.6", "matplotlib", "ruff", "build", "pyarrow", "fastapi", "uvicorn", "openai", "rich"],
    },
    entry_points={"console_scripts": ["apexk=apexk.cli:main"]},
    ext_modules=[
        Extension(name, sources=[])
        for name in ("apexk.kernels.cpu._apexk_cpu", *(f"{room.replace('/', '.')}.{library}" for room, names in NATIVE_ROOMS.items() for library in names))
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
)
