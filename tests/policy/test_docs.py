"""The documented example runs as it stands."""

import re
import sys
from pathlib import Path

from apexk.policy.kit import check_policy

PAGE = Path(__file__).parents[2] / "docs" / "write_a_policy.md"


def test_the_example_passes_the_kit(tmp_path, monkeypatch, capsys):
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1)
    assert len(source.splitlines()) <= 30
    (tmp_path / "my_policies.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])  # as in the installed command
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)
    from apexk.cli import main
    from apexk.policy import get

    code = main(["simulate", "--steps", "4", "--warmup", "1", "--batch", "2", "--jobs", "1", "--policy", "my_policies:HalfAndHalf", "--no-references"])
    made = type(get("my_policies:HalfAndHalf"))
    assert check_policy(made, traces=60).copies > 0
    monkeypatch.delitem(sys.modules, "my_policies")
    assert code == 0 and "my_policies:HalfAndHalf" in capsys.readouterr().out
