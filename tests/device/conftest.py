import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "engine")]  # `cuda_on_fake`, `removals`: importlib mode gives test modules no package


@pytest.fixture
def fake_gpu(monkeypatch):
    """`with fake_gpu(**options) as made:` swaps on a fake CUDA runtime; nothing of it may be left at the end."""
    pytest.importorskip("apexk.device.native.fake")
    from contextlib import contextmanager

    from cuda_on_fake import fake_gpu as opened
    from cuda_on_fake import left

    @contextmanager
    def use(**options):
        with opened(monkeypatch, **options) as made:
            yield made
        for runtime in made:
            assert left(runtime) == {}, "not given back"

    return use
