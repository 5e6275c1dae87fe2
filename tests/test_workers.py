"""Processes that share work: results in order, and nobody left or heard when the one that asked is interrupted or killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from apexk.workers import spread

WAITS = """
import os, signal, sys, time
from apexk.workers import spread

def work(item):
    os.write(1, b"began\\n")  # whole, whatever the buffering
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the suite runs in a shell's background
    try:
        list(spread(work, [1, 2, 3], 2, fresh={fresh}))
    except KeyboardInterrupt:
        sys.exit(130)
"""


def double(n):
    return 2 * n


def fail(n):
    raise ValueError(f"item {n}")


def fail_at_once(n):
    if n == 0:
        raise ValueError(f"item {n}")
    time.sleep(0.2)


def die(n):
    os.kill(os.getpid(), signal.SIGKILL)


def test_results_come_in_order():
    assert list(spread(double, range(20), 3, chunk=4)) == [2 * n for n in range(20)]


def test_what_work_raises_is_raised():
    with pytest.raises(ValueError, match="item 1"):
        list(spread(fail, [1, 2], 2))


@pytest.mark.parametrize("fresh", [False, True], ids=["copies", "fresh"])
def test_a_failure_with_work_left_is_raised_and_no_thread_says_more(fresh, monkeypatch):
    heard = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    with pytest.raises(ValueError, match="item 0"):
        list(spread(fail_at_once, range(40), 2, fresh=fresh))
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join(5)
    assert not heard and not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_no_hang():
    with pytest.raises(BrokenProcessPool):
        list(spread(die, [1, 2], 2))


@pytest.fixture(params=[False, True], ids=["copies", "fresh"])
def waiting(request, tmp_path):
    """A process that waits for two workers, all in a session of their own, as under a terminal."""
    (tmp_path / "waits.py").write_text(WAITS.format(fresh=request.param))
    process = subprocess.Popen([sys.executable, tmp_path / "waits.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert [process.stdout.readline() for _ in range(2)] == ["began\n"] * 2
    yield process
    if session(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                state, _, _, of = stat.read().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == leader and state != "Z":
            found.append(int(pid))
    return found


def test_an_interrupt_is_the_askers_alone(waiting):
    os.killpg(waiting.pid, signal.SIGINT)
    _, said = waiting.communicate(timeout=60)
    assert (waiting.returncode, said) == (130, "")
    assert gone(waiting.pid)


def test_nobody_outlives_an_asker_that_is_killed(waiting):
    waiting.kill()
    waiting.wait()
    assert gone(waiting.pid)


def gone(leader: int) -> bool:
    for _ in range(600):  # ends as soon as it is so: how long that takes is the system's business
        if not session(leader):
            return True
        time.sleep(0.05)
    return False
