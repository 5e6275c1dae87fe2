"""`make test-isa`: the library's vector objects on their own instructions, in Bochs, against the emulation, bit by bit.

Bochs 3.0 interprets AVX-512, its BF16 products and AMX tiles on any machine. It is taken from PATH (3.0 or newer), else
fetched by fetch.sh. boot.S is a ROM that calls payload.cpp; no operating system is involved. What the payload prints through
Bochs' debug port must equal what it prints as a program of this machine, linked with the emulated objects. Where Bochs
cannot be had, that is said and the exit status is 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
HERE = SOURCES.parents[1]
ROOT = HERE.parents[1]
ROM_BYTES, BOOT_BYTES = 0x100000, 0x10000
BARE = ["-DBARE", "-ffreestanding", "-fno-exceptions", "-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-mno-red-zone",
        "-fno-pic"]  # fmt: skip
SETTINGS = """\
cpu: model=sapphire_rapids, count=1, ips=100000000, reset_on_triple_fault=0
megs: 64
romimage: file=image.rom, address=0xfff00000
vgaromimage: file={vga}
boot: disk
ata0: enabled=0
display_library: rfb, options="timeout=0"
port_e9_hack: enabled=1
log: bochs.log
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
clock: sync=none
"""


def build_module():
    """kernels/cpu/build.py by its path: this file runs as a script, outside the package."""
    spec = importlib.util.spec_from_file_location("apexk_cpu_build", HERE / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bochs(folder: Path) -> tuple[list[str], dict[str, str], Path] | None:
    """(command, environment, folder of its ROM files); None where there is none to be had."""
    found = shutil.which("bochs")
    if found:
        version = re.search(r"Bochs x86 Emulator (\d+)", subprocess.run([found, "--help"], capture_output=True, text=True).stdout)
        if version and int(version[1]) >= 3:
            return [found], dict(os.environ), Path(os.environ.get("BXSHARE", "/usr/share/bochs"))
    if subprocess.run([SOURCES / "fetch.sh", folder]).returncode:
        return None
    libraries, share = folder / "usr/lib/x86_64-linux-gnu", folder / "usr/share/bochs"
    loader = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(folder / "usr/bin/bochs-bin")]
    return loader, {**os.environ, "LTDL_LIBRARY_PATH": str(libraries / "bochs/plugins"), "BXSHARE": str(share)}, share


def make_rom(build, work: Path) -> None:
    """work/image.rom: the payload with the library's own objects, then the boot code."""
    objects = ROOT / "build" / "cpu"
    build.build(objects, objects)
    call = build.compiler()
    subprocess.run([*call, "-O2", "-std=c++20", *BARE, f"-I{HERE / 'include'}", "-c", SOURCES / "payload.cpp", "-o", work / "payload.o"], check=True)
    parts = [work / "payload.o", *(objects / f"{unit}.o" for unit in build.X86)]
    subprocess.run([*call, "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none,--no-warn-rwx-segments", "-T", SOURCES / "image.ld", *parts, "-o", work / "image.elf"], check=True)
    subprocess.run([*call, "-c", SOURCES / "boot.S", "-o", work / "boot.o"], check=True)
    for source, sections in (("image.elf", (".text", ".rodata", ".data")), ("boot.o", (".text",))):
        only = [word for section in sections for word in ("-j", section)]
        subprocess.run(["objcopy", "-O", "binary", *only, work / source, (work / source).with_suffix(".bin")], check=True)
    image, boot = (work / "image.bin").read_bytes(), (work / "boot.bin").read_bytes()
    if len(image) > ROM_BYTES - BOOT_BYTES or len(boot) != BOOT_BYTES:
        raise RuntimeError(f"the image takes {len(image)} bytes of {ROM_BYTES - BOOT_BYTES}: raise ROM_BYTES here and in boot.S")
    (work / "image.rom").write_bytes(image.ljust(ROM_BYTES - BOOT_BYTES, b"\0") + boot)


def emulated(build, work: Path) -> list[str]:
    """What the payload prints on this machine."""
    objects = ROOT / "build" / "cpu-emulated"
    build.build(objects, objects, emulate=True)
    parts = [SOURCES / "payload.cpp", *(objects / f"{unit}.o" for unit in build.X86)]
    subprocess.run([*build.compiler(), "-O2", "-std=c++20", f"-I{HERE / 'include'}", *parts, "-o", work / "payload"], check=True)
    return subprocess.run([work / "payload"], check=True, capture_output=True, text=True).stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=300, help="how long Bochs may run (default 300)")
    arguments = parser.parse_args()
    if platform.machine() != "x86_64" or shutil.which("objcopy") is None:
        print("test-isa: NOT RUN: it needs an x86-64 machine with binutils")
        return 0
    have = bochs(ROOT / "build" / "bochs")
    if have is None:
        print("test-isa: NOT RUN: Bochs 3.0 is not installed and could not be fetched; the emulated tests stand alone")
        return 0
    command, environment, share = have
    work = ROOT / "build" / "test-isa"
    work.mkdir(parents=True, exist_ok=True)
    build = build_module()
    make_rom(build, work)
    (work / "bochsrc").write_text(SETTINGS.replace("{vga}", str(next(share.glob("VGABIOS-lgpl-latest*")))))
    (work / "commands").write_text("c\n")  # Debian's Bochs has its debugger built in: continue
    want = emulated(build, work)
    done = subprocess.run([*command, "-q", "-f", "bochsrc", "-rc", "commands"], cwd=work, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=arguments.seconds)  # fmt: skip
    first = want[0].split()[0]
    text = done.stdout[done.stdout.find(f"{first} "):]
    got = [line.strip() for line in text.splitlines()][: len(want)]
    for line, there in zip(want, [*got, *[""] * len(want)], strict=False):
        print(f"{'equal ' if line == there else 'DIFFERS'} {line}" + ("" if line == there else f"\n   Bochs {there}"))
    if got != want:
        print(f"test-isa: FAILED: see {work / 'bochs.log'}", file=sys.stderr)
        return 1
    print("test-isa: the real instructions give the emulation's bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
