"""What a policy that looks several layers ahead is told, against the model's own gates."""

import pytest
import torch
from hf_models import tiny

import apexk


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_each_later_layers_gate_sees_this_layers_input(ahead):
    torch.manual_seed(0)
    model = tiny(num_hidden_layers=5, num_experts=8)
    gates = [layer.mlp.gate.weight.detach() for layer in model.model.layers]
    seen = []
    with apexk.swap(model, apexk.ApexConfig(policy=f"hybrimoe(look_ahead={ahead})", pool=3)) as handle, torch.no_grad():
        predict = handle.engine.device.predict

        def watched(at, rows, routers):
            ticket = predict(at, rows, routers)
            seen.append((at.layer, rows.x.clone(), handle.engine.device.take_prediction(ticket)))
            return ticket

        handle.engine.device.predict = watched
        model(torch.tensor([[3, 5, 7, 9]]))
    assert [layer for layer, _, _ in seen] == [0, 1, 2, 3], "the last layer has none to predict"
    for layer, x, predictions in seen:
        later = gates[layer + 1 : layer + 1 + ahead]
        assert len(predictions) == len(later)
        for gate, (loads, scores) in zip(later, predictions, strict=True):
            weights, ids = torch.softmax(x.double() @ gate.double().T, -1).topk(2)
            weights = weights / weights.sum(-1, keepdim=True) if model.config.norm_topk_prob else weights
            wanted = {e: ids.eq(e) for e in set(ids.reshape(-1).tolist())}
            assert loads == {e: int(where.sum()) for e, where in wanted.items()}
            assert scores == pytest.approx({e: float(weights[where].sum()) for e, where in wanted.items()}, rel=1e-4)
