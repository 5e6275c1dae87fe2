"""Finds every place where the native code waits, records, locks, wakes or orders memory, and makes each removable.

All mutants of a file are compiled at once: the instrumented source asks `APEXK_MUTANT`, read when the program starts,
which site to leave out. A removed call answers what means "done" (0, true) or nothing; a removed lock takes a mutex of
the thread's own; a removed ordering is relaxed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: what a site looks like -> what stands in its place; {0} is the site itself
CALLS = {
    r"\bapi_\.(set_device|event_record|event_query|event_synchronize|stream_wait_event|stream_synchronize|stream_write_value64"
    r"|stream_wait_value64|launch_host_func|get_last_error)(?=\()": "0",
    r"(?<!bool )\bpoll(?=\()": "true",
    r"(?<![\w.>])[\w.>-]*(?:\.|->)(wait|wait_for|notify_one|notify_all|join|lock|unlock)(?=\()": "void()",
    r"\bwait_until(?=\()": "void()",
}
LOCK = r"std::(?:lock_guard|unique_lock) \w+(?=\()"
ORDER = r"std::memory_order_(?:acquire|release)"

PRELUDE = """#include <stdlib.h>
#include <mutex>
namespace {
const int kMutant = getenv("APEXK_MUTANT") ? atoi(getenv("APEXK_MUTANT")) : -1;
[[maybe_unused]] std::mutex &no_mutex() {
  thread_local std::mutex mutex;
  return mutex;
}
}  // namespace
#line 1 "%s"
"""


class Site(NamedTuple):
    number: int
    line: int
    text: str


def instrument(source: str, name: str, first: int) -> tuple[str, list[Site]]:
    """The source with its sites switchable, numbered from `first`, and the sites."""
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), source)
    found = [(match, kind) for kind in (*CALLS, LOCK, ORDER) for match in re.finditer(kind, code)]
    found.sort(key=lambda item: item[0].start())
    edits, sites = [], []
    for number, (match, kind) in enumerate(found, first):
        start, end = match.span()
        test = f"kMutant == {number} ? "
        if kind == ORDER:
            edits += [(start, f"({test}std::memory_order_relaxed : "), (end, ")")]
        elif kind == LOCK:
            edits.append((end + 1, f"{test}no_mutex() : "))
        else:
            end = _closing(code, end)
            value = CALLS[kind]
            edits += [(start, f"({test}{value} : {'void(' if value == 'void()' else '('}"), (end, "))")]
        sites.append(Site(number, code.count("\n", 0, start) + 1, " ".join(code[start:end].split())))
    for position, text in sorted(edits, key=lambda edit: edit[0], reverse=True):  # stable: an outer site's end comes after an inner one's
        source = source[:position] + text + source[position:]
    return PRELUDE % name + source, sites


def _closing(code: str, opening: int) -> int:
    """The position behind the parenthesis that closes the one at `opening`."""
    depth = 0
    for position in range(opening, len(code)):
        depth += {"(": 1, ")": -1}.get(code[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"no closing parenthesis for the one at {opening}")
