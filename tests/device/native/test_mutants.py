"""Every wait, record, lock, wake-up and memory order of the channel and the hand-off is needed: without it the self-test fails.

The sites are found by scanning the sources, so a new one is tested too. The self-test runs under the thread sanitizer on
the fake runtime: a mutant is caught by a data race, a wrong value, a hang or an abort.
"""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from apexk.device.native import build
from apexk.device.native.tests.mutate import instrument

FOLDER = build.ROOT / "build" / "transfer-mutants"
HANG_SECONDS = 6  # for one scenario; the longest takes half a second
TRIES = 5  # of a mutant that goes by unseen: whether two threads meet is chance
GROUPS = ("channel", "hand_off")  # source file and scenarios of the self-test

#: sites whose removal the self-test cannot see, each with the reason why it is nevertheless right to have them
PROVED = {}


@pytest.fixture(scope="module")
def mutants():
    """(self-test, its sites by group): compiled once, each mutant chosen when it starts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    replaced, sites, first = {}, {}, 0
    for group in GROUPS:
        path = build.HERE / "src" / f"{group}.cpp"
        source, sites[group] = instrument(path.read_text(), str(path), first)
        first += len(sites[group])
        replaced[group] = FOLDER / f"{group}.cpp"
        if not replaced[group].exists() or replaced[group].read_text() != source:
            replaced[group].write_text(source)
    return build.build_selftest(FOLDER, ["-fsanitize=thread"], replaced), sites


def run(selftest: Path, group: str, mutant: int, seconds: int = HANG_SECONDS) -> tuple[int, str]:
    environment = {**os.environ, "APEXK_MUTANT": str(mutant), "APEXK_SELFTEST_SECONDS": str(seconds), "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([selftest, group], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def seen(selftest: Path, group: str, mutant: int) -> tuple[int, str]:
    """The first run that fails, else the last."""
    for _ in range(TRIES):
        code, output = run(selftest, group, mutant)
        if code:
            break
    return code, output


def how(code: int, output: str) -> str:
    if "ThreadSanitizer: data race" in output:
        return "race"
    return {-14: "hang", 1: "value", -6: "abort"}.get(code, f"exit {code}")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_site_is_needed(mutants, group):
    selftest, sites = mutants
    code, output = run(selftest, group, -1, seconds=120)  # whole, it may be slow on a busy machine
    assert code == 0, output
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
        results = list(workers.map(lambda site: seen(selftest, group, site.number), sites[group]))
    caught = {site: how(*result) for site, result in zip(sites[group], results, strict=True) if result[0]}
    for site, reason in caught.items():
        print(f"{group}.cpp:{site.line}: {reason}: {site.text[:90]}")
    survivors = [f"{group}.cpp:{site.line}: {site.text}" for site in sites[group] if site not in caught]
    assert set(survivors) <= set(PROVED), survivors


def test_the_scan():
    source = """
      std::lock_guard lock(mutex_);  // news_.wait(lock)
      if (!(error = api_.event_record(events[f(1)], stream))) news_.notify_one();
      poll(until, [this] { return flag.load(std::memory_order_acquire) == 1; });
    """
    text, sites = instrument(source, "x.cpp", 5)
    assert [(site.number, site.line, site.text) for site in sites] == [
        (5, 2, "std::lock_guard lock"),
        (6, 3, "api_.event_record(events[f(1)], stream)"),
        (7, 3, "news_.notify_one()"),
        (8, 4, "poll(until, [this] { return flag.load(std::memory_order_acquire) == 1; })"),
        (9, 4, "std::memory_order_acquire"),
    ]
    assert "lock_guard lock(kMutant == 5 ? no_mutex() : mutex_);  // news_.wait(lock)" in text
    assert "error = (kMutant == 6 ? 0 : (api_.event_record(events[f(1)], stream)))))" in text
    assert "(kMutant == 7 ? void() : void(news_.notify_one()));" in text
    assert "(kMutant == 8 ? true : (poll(" in text and "(kMutant == 9 ? std::memory_order_relaxed : std::memory_order_acquire)" in text
