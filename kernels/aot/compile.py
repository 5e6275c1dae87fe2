"""Compile one recorded launch for a named target and describe the machine code. Needs the triton wheel, no driver, no GPU.

What it cannot say is how long the kernel takes.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .record import Launch
from .sass import Counts, count
from .targets import TARGETS, occupancy


@dataclass
class Report:
    kernel: str
    label: str
    target: int
    triton: str
    ptxas: str
    regs: int
    spill_bytes: int  # stored and loaded
    shared_bytes: int
    fits: bool
    warps: int
    stages: int
    blocks: int  # resident on an SM
    occupancy: int  # percent of the SM's warps
    limiter: str
    inflight_kib: float  # that the software pipelines of an SM's blocks hold requested, an estimate
    need_kib: float
    all: Counts
    loop: Counts
    half: bool = False  # multiplies half-precision operands
    note: str = ""
    variant: str = ""  # tells apart launches of one kernel, case and tile

    def plain(self) -> dict:
        """Numbers, strings and dicts only, for a JSON file."""
        counts = {name: vars(getattr(self, name)) for name in ("all", "loop")}
        return {**vars(self), **{name: {k: dict(v) if isinstance(v, dict) else v for k, v in c.items()} for name, c in counts.items()}}


def analyse(launch: Launch, target: int, label: str = "") -> Report:
    """Raises what Triton or ptxas raises where the launch does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attrs = launch.source()
    source = ASTSource(launch.kernel, signature, constexprs=constexprs, attrs=attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=launch.options)
    meta = compiled.metadata
    regs, spills, version = _ptxas(compiled.asm["ptx"], target, bool(getattr(meta, "enable_fp_fusion", True)))
    try:
        everything, loop, note = *count(disassemble(compiled.asm["cubin"])), ""
    except RuntimeError as error:  # an older wheel's disassembler may not know a newer target
        everything, loop, note = Counts(), Counts(), str(error)
    warps = int(getattr(meta, "total_num_warps", None) or meta.num_warps)
    stages = int(getattr(meta, "num_stages", 1))
    space = occupancy(target, regs, meta.shared, warps)
    piped = bool(everything.copies or everything.tma)
    inflight = space.blocks * meta.shared * (stages - 1) / max(stages, 1) / 1024 if piped else 0.0
    half = any(t in ("*bf16", "*fp16") for t in signature.values()) and "tt.dot" in compiled.asm.get("ttir", "")
    return Report(
        launch.kernel.__name__, label, target, triton.__version__, version, regs, spills, meta.shared, space.fits, warps,
        stages, space.blocks, space.percent, space.limiter, round(inflight, 1), round(TARGETS[target].need_kib, 1),
        everything, loop, half, note, launch.variant(),
    )  # fmt: skip


def _ptxas(ptx, target, fp_fusion):
    """(registers a thread, spilled bytes, version) by assembling once more with -v, as Triton does it."""
    import triton.backends.nvidia.compiler as backend

    path = backend.get_ptxas(target).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [path, "-lineinfo", "-v", f"--gpu-name={backend.sm_arch_from_capability(target)}"]
        command += [] if fp_fusion else ["--fmad=false"]
        if "regAllocOptLevel" in Path(backend.__file__).read_text():  # Triton 3.8 and later pass it
            command.append("--regAllocOptLevel=2")
        done = subprocess.run([*command, str(source), "-o", str(Path(folder, "kernel.o"))], capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"ptxas failed for sm_{target}: {log[-1000:]}")
    version = re.search(r"release ([\d.]+)", subprocess.run([path, "--version"], capture_output=True, text=True).stdout)
    spills = sum(_number(rf"(\d+) bytes spill {kind}", log) for kind in ("stores", "loads"))
    return _number(r"Used (\d+) registers", log), spills, version.group(1) if version else "?"


def _number(pattern, text) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def disassemble(cubin: bytes) -> str:
    """SASS of a cubin by the tools in the Triton wheel. Raises RuntimeError where they do not know its target."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        for command in (
            [knobs.nvidia.cuobjdump.path, "-sass", file.name],
            [knobs.nvidia.nvdisasm.path, "-hex", file.name],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0 and re.search(r"/\*[0-9a-f]{4,}\*/", done.stdout):
                return done.stdout
    raise RuntimeError("not disassembled, so all instruction counts are 0: " + done.stderr.strip()[:200])
