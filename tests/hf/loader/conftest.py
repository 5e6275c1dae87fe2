import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # `checkpoints`: importlib mode gives test modules no package


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Whatever a load did: the library's classes are as they were and no file stays open."""
    from checkpoints import experts_init, open_checkpoints

    before = experts_init()
    yield
    assert experts_init() is before
    assert not open_checkpoints()
