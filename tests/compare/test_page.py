"""The committed page: its command is one that the verb takes, its rows are systems that there are, its picture is there."""

import argparse
import re
import shlex
from pathlib import Path

from apexk.cli import compare
from apexk.compare.measure import BESIDE
from apexk.compare.systems import BY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "systems.md"


def test_the_page_is_what_its_command_writes():
    text = PAGE.read_text(encoding="utf-8")
    words = shlex.split(re.search(r"^    (apexk compare .*)$", text, re.MULTILINE).group(1))
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    args = parser.parse_args(words[2:])
    places = len(args.preset) * len(args.hardware) * len(args.pool)
    assert len(re.findall(r"^## .* slots a layer", text, re.MULTILINE)) == places
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert set(rows) <= {*BY_NAME, *(system.name for system in BESIDE)}
    for name in set(rows) & BY_NAME.keys():
        assert rows.count(name) == 1 + places, f"{name}: one line of its own and one a place"
    for picture in re.findall(r"\]\((\S+\.png)\)", text):
        assert (PAGE.parent / picture).is_file()
