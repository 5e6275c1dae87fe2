"""Threads, asynchronous jobs and what happens at their edges."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from apexk.kernels.cpu.ffn import HostFFN


def test_submit_then_wait(case):
    one = case(33, 100, 72)
    with HostFFN(threads=2, oversubscribe=True) as ffn:
        job = ffn.submit(*one.arguments(), intermediate=72)
        job.wait()
        assert job.done()
        job.wait()  # a second wait returns at once
    one.check(one.out)


def test_jobs_without_a_waiter_are_done_at_close(case):
    cases = [case(9, 100, 72, seed=seed) for seed in range(8)]
    with HostFFN(threads=2, oversubscribe=True) as ffn:
        jobs = [ffn.submit(*one.arguments(), intermediate=72) for one in cases]
    assert all(job.done() for job in jobs)
    for one in cases:
        one.check(one.out)


@pytest.mark.parametrize("own", [1, 2])
@pytest.mark.parametrize("summed", [False, True])
def test_on_the_threads_of_torch(case, own, summed):
    """Where they are as many as the pool's; the pool's have nothing to do then."""
    one = case(33, 100, 72)
    want, out = (torch.empty(33 if summed else one.out.shape[0], 100) for _ in range(2))
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with HostFFN(threads=own, oversubscribe=True) as ffn:
            ffn.run(*one.arguments()[:-1], want, intermediate=72, summed=summed)
            ffn.run(*one.arguments()[:-1], out, intermediate=72, summed=summed, with_torch=True)
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(out, want)
    if not summed:
        one.check(out)


def test_on_the_threads_of_torch_the_pool_sleeps(case):
    """Counted by the switches of its threads: each sleeps once after its start, and is not woken."""
    one = case(400, 264, 200)
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        others = set(os.listdir("/proc/self/task"))
        with HostFFN(threads=2, oversubscribe=True) as ffn:
            mine = set(os.listdir("/proc/self/task")) - others
            for _ in range(3):
                ffn.run(*one.arguments(), intermediate=200, with_torch=True)
            while not all("State:\tS" in line for line in _lines(mine, "State:")):  # each has found nothing to do
                pass
            before = _lines(mine, "ctxt_switches")
            for _ in range(20):
                ffn.run(*one.arguments(), intermediate=200, with_torch=True)
            assert _lines(mine, "ctxt_switches") == before
    finally:
        torch.set_num_threads(usual)


def _lines(tasks, word) -> list[str]:
    """What the system says of threads of this process."""
    found = []
    for task in sorted(tasks):
        with open(f"/proc/self/task/{task}/status", encoding="ascii") as lines:
            found += [line for line in lines if word in line]
    return found


def test_a_dropped_job_keeps_its_buffers(case):
    one = case(33, 100, 72)
    want = one.expected()
    with HostFFN(threads=2, oversubscribe=True) as ffn:
        ffn.submit(one.x.clone(), *one.arguments()[1:], intermediate=72)
        gc.collect()
        assert not one.out.isnan().any()
    assert (one.out - want).abs().max() < 1e-2


def test_empty_job_is_done(case):
    one = case(0, 64, 32)
    with HostFFN(threads=2, oversubscribe=True) as ffn:
        job = ffn.submit(*one.arguments(), intermediate=32)
        assert job.done()


def test_closed_pool_refuses(case):
    ffn = HostFFN(threads=1)
    ffn.close()
    ffn.close()
    with pytest.raises(ValueError, match="closed"):
        case(3, 64, 32).run(ffn)


def test_threads_start_and_end_with_the_owner(native_threads):
    ended, before = native_threads(), len(os.listdir("/proc/self/task"))
    ffn = HostFFN(threads=3, oversubscribe=True)
    assert len(os.listdir("/proc/self/task")) == before + 3
    ffn.close()
    assert ended()
    HostFFN(threads=3, oversubscribe=True)  # dropped at once
    gc.collect()
    assert ended()


def test_import_starts_no_thread():
    code = (
        "import os; before = len(os.listdir('/proc/self/task')); import torch; torch_has = len(os.listdir('/proc/self/task'));"
        "import apexk.kernels.cpu.ffn as f; f.lib.load(); assert len(os.listdir('/proc/self/task')) == torch_has"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_default_threads_follow_the_affinity_mask():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from apexk.kernels.cpu.ffn import HostFFN; assert HostFFN().threads == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_idle_pool_uses_no_processor(case, assert_idle):
    one = case(4, 64, 32)
    with HostFFN(threads=2, oversubscribe=True) as ffn:
        one.run(ffn)
        assert_idle()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_small_calls(case, threads):
    """Wakes, sleeps and the ends of jobs in every order."""
    one = case(2, 32, 32)
    with HostFFN(threads=threads, oversubscribe=True) as ffn:
        want = one.run(ffn)
        for _ in range(300):
            assert torch.equal(one.run(ffn), want)
