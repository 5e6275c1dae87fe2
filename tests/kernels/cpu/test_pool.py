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
