"""The eviction study: the generator's state is what it says, and the references bound the rules."""

import json

import numpy as np

from apexk import cli
from apexk.sim import evictions
from apexk.sim.generate import PRESETS, Shape, generate

SMALL = Shape("small", 3, 48, 4)


def test_watching_changes_nothing_and_sees_the_scores_parts():
    seen = []
    watched = generate("mmlu-like", shape=SMALL, batch=5, steps=6, seed=2, watch=lambda *parts: seen.append([p.copy() for p in parts]))
    plain = generate("mmlu-like", shape=SMALL, batch=5, steps=6, seed=2)
    assert np.array_equal(watched.routed_experts, plain.routed_experts) and len(seen) == 6
    popular, shared, requests = seen[3]
    assert popular.shape == shared.shape == (3, 48) and requests.shape == (3, 5, 48)
    # the lasting parts decide most of the routing: those of chosen experts stand far above the others'
    score = ((popular + shared)[:, None] + requests).swapaxes(0, 1)  # [B, L, E], mean 0 and variance below 1
    chosen = plain.routed_experts.reshape(6, 5, 3, 4)[3]
    assert np.take_along_axis(score, chosen.astype(int), -1).mean() > 1


def test_expected_tokens_foretell_the_next_step():
    """Ranked by the state, experts of the upper half carry most of the next step's tokens; by chance it would be half."""
    states = []
    trace = generate("sticky", shape=SMALL, batch=8, steps=30, seed=1, watch=lambda *parts: states.append(evictions._expected(PRESETS["sticky"], SMALL, *parts)))
    routed = trace.routed_experts.reshape(30, 8, 3, 4)
    hits = []
    for step in range(29):
        for layer in range(3):
            top = np.argsort(-states[step][layer])[:24]
            hits.append(np.isin(routed[step + 1, :, layer], top).mean())
    assert np.mean(hits) > 0.85


def test_the_command(tmp_path, capsys):
    words = ["--preset", "sticky", "--hardware", "pinned-link", "--layers", "4", "--steps", "24", "--seeds", "5", "--json", tmp_path / "e.json"]
    assert cli.main(["evictions", *map(str, words)]) == 0
    assert "hidden" in capsys.readouterr().out
    row = json.loads((tmp_path / "e.json").read_text())["rows"][0]
    assert row["ms"]["belady"] < min(ms for rule, ms in row["ms"].items() if rule != "belady")
    assert row["closed"]["belady"] == 1 and row["closed"]["utility 0.9"] == 0
    assert cli.main(["evictions", "--preset", "nope"]) == cli.MISUSE
    assert "nope" in capsys.readouterr().err


def test_a_pool_without_a_choice_of_victims_is_refused(capsys):
    assert cli.main(["evictions", "--pool", "256", "--steps", "12", "--layers", "1"]) == cli.MISUSE
    assert "wanted 2 to 255" in capsys.readouterr().err
