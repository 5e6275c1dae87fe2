import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # `hf_models`: importlib mode gives test modules no package


@pytest.fixture
def fresh():
    from hf_models import snapshot

    from apexk.demo import model as demo

    model, tokenizer = demo.load()
    return model, tokenizer, snapshot(model), list(model.state_dict())
