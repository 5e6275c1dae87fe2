"""Every experts class of the installed transformers: swapped and equal, or refused with the reason that the docs give."""

from pathlib import Path

import pytest
import transformers

from apexk.testing import sweep

DOCS = Path(__file__).resolve().parents[2] / "docs" / "families.md"
CLASSES = sweep.experts_classes()
rows: list[sweep.Row] = []


def test_the_library_has_experts():
    names = {found.name for found in CLASSES}
    assert {"MixtralExperts", "Qwen3_5MoeExperts", "GptOssExperts", "DbrxExperts", "Llama4TextExperts", "SwitchTransformersExperts"} <= names
    assert sum(found.on_interface for found in CLASSES) > 60


@pytest.mark.parametrize("found", CLASSES, ids=lambda f: f"{f.module}-{f.name}")
def test_swapped_and_equal_or_refused(found):
    row = sweep.check(found)
    rows.append(row)
    assert bool(row.replaced) != bool(row.reason)
    if row.replaced:
        assert row.difference < 1e-4
        assert row.matters > 0.05, "the experts' weights must show in what is compared"


def test_the_docs_say_so():
    if len(rows) != len(CLASSES):
        pytest.skip("needs all of the tests above")
    text = DOCS.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip(f"docs/families.md is of another version than {transformers.__version__}")
    assert text == sweep.table(rows), "run: python -m apexk.testing.sweep > docs/families.md"
