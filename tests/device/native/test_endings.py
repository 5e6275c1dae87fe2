"""Interrupts at random moments, and what a process holds after many lives of the layer."""

import subprocess
import sys

CODE = """
import gc, os, random, signal, time
import torch
torch.set_num_threads(1)
from apexk.device.native.channel import Channel, Copy
from apexk.device.native.fake import FakeCuda
from apexk.device.native.hand_off import HandOff
from apexk.kernels.cpu.ffn import HostFFN

weights = torch.randn(2, 3 * 16 * 16)
blocks = torch.tensor([row.data_ptr() for row in weights])

working = [False]  # an interrupt comes only then: what is interrupted while it is made or closed is the callers' care

def life(rounds):
    runtime = FakeCuda(delay_us=20)
    try:
        ffn = HostFFN(threads=1)
        hand_off = HandOff(runtime, ffn, max_experts=2, how=random.choice(["flags", "host functions"]))
        h2d = runtime.new_stream("h2d")
        channel = Channel(runtime, h2d, chunk_bytes=1024)
        try:
            down, back = runtime.new_stream("down"), runtime.new_stream("back")
            x, out = (runtime.empty_pinned((1, 16), torch.float32) for _ in range(2))
            ids, pair = runtime.empty_pinned((1, 1), torch.int64).zero_(), runtime.empty_pinned((1, 1), torch.float32)
            source, slot = runtime.empty_pinned((4, 4096), torch.uint8).random_(), runtime.empty_device((4, 4096), torch.uint8)
            copies = [Copy(n, 1, slot[n].data_ptr(), source[n].data_ptr(), 4096, runtime.new_event()) for n in range(4)]
            working[0] = True
            for _ in range(rounds):
                channel.speculate(copies[:3])
                ticket = hand_off.submit(down, x, blocks, ids, pair, [0, 1], out, intermediate=16)
                channel.copy(copies[3:], copies[3].done)
                hand_off.join(ticket, back)
                stopped = channel.stop(1)
                if stopped.running:
                    channel.keep(stopped.running[0])
                hand_off.wait(ticket)
                runtime.synchronize_stream(h2d)
                assert slot[3].equal(source[3])
            working[0] = False
        finally:
            channel.close()
            hand_off.close()
            ffn.close()
    finally:
        runtime.close()

gc.freeze()  # what was imported is no part of what is looked for, and takes a tenth of a second to walk
OWN = len(os.listdir("/proc/self/task"))  # torch's

def held():
    gc.collect()
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) > OWN and time.monotonic() < deadline:
        time.sleep(0.001)
    return len(os.listdir("/proc/self/task")), sum(1 for _ in open("/proc/self/maps"))
"""

INTERRUPTS = """
def interrupt(*_):
    if working[0]:
        working[0] = False
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
random.seed(5)
life(5)
start = time.perf_counter()
life(5)
usual = time.perf_counter() - start
interrupted = lives = 0
while interrupted < 100:  # a life that ended before its interrupt does not count, and says how long a life is by now
    lives += 1
    assert lives < 2000, f"{interrupted} interrupts in {lives} lives"
    start = time.perf_counter()
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, usual))
        try:
            life(5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        usual = time.perf_counter() - start
    except KeyboardInterrupt:
        interrupted += 1
    threads, _ = held()
    assert threads == OWN, f"{threads} threads after interrupt {interrupted}"
life(5)
"""

LIVES = """
life(2)
for _ in range(5):
    life(2)
threads, maps = held()
for _ in range(50):
    life(2)
after = held()
assert after[0] == OWN and after[1] < maps + 25, (threads, maps, after)  # fifty lives that kept one each would hold fifty more
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE + code], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_interrupt_at_a_random_moment_a_hundred_times():
    """While work is under way: no thread is left, and the next life works."""
    run(INTERRUPTS)


def test_fifty_lives_leave_no_thread_and_no_mapping():
    run(LIVES)
