import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.training.engine import configured, parameters, tiny_model
from tests.training.ranks import run_ranks
from training import optimizer


def _rate(step, warmup_steps=4, num_steps=20):
    return optimizer.learning_rate_at(step, peak=1.0, num_steps=num_steps, warmup_steps=warmup_steps)


def test_the_warm_up_is_linear_and_reaches_the_peak():
    assert [_rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_cosine_ends_at_a_tenth_of_the_peak():
    assert _rate(20) == pytest.approx(0.1)
    assert _rate(12) == pytest.approx(0.55)


def test_the_rate_never_rises_after_the_warm_up():
    rates = [_rate(step) for step in range(4, 21)]
    assert rates == sorted(rates, reverse=True)


def test_without_warm_up_the_first_step_has_the_peak():
    assert _rate(1, warmup_steps=0) == 1.0
    assert _rate(20, warmup_steps=0) == pytest.approx(0.1)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_run_shorter_than_its_warm_up_only_rises(num_steps):
    assert [_rate(s, num_steps=num_steps) for s in range(1, num_steps + 1)] == [
        s / 4 for s in range(1, num_steps + 1)
    ]


def test_norms_and_biases_do_not_decay():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    decays = {
        id(parameter): group["weight_decay"]
        for group in optimizer.build(model, 1e-3, 0.1).param_groups
        for parameter in group["params"]
    }
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "1.weight": 0.1,
        "1.bias": 0.0,
        "2.weight": 0.0,
        "2.bias": 0.0,
    }


def test_a_shared_parameter_is_updated_once():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    groups = optimizer.build(model, 1e-3, 0.1).param_groups
    assert [len(group["params"]) for group in groups] == [1]


def test_zero_means_no_clipping_but_still_a_norm():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert optimizer.clip_gradients([parameter], 0.0) == 5.0
    assert parameter.grad.tolist() == [3.0, 4.0]
    assert optimizer.clip_gradients([parameter], 1.0) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def _two_updates(worker, nodes):
    model = tiny_model(worker, nodes, configured())
    adamw = optimizer.build(model, 1e-2, 0.1)
    before = parameters(model)
    for factor in (1.0, 0.5):
        for parameter in model.parameters():
            parameter.grad = factor * parameter.detach().sin()
        adamw.step()
    states = [value for state in adamw.state.values() for name, value in state.items() if name != "step"]
    return before, parameters(model), all(isinstance(value, DTensor) for value in states)


def test_the_update_of_shards_is_that_of_whole_parameters():
    before, after, keeps_dtensors = run_ranks(_two_updates, 4, ["a"] * 4)[0]
    assert keeps_dtensors  # checkpoints save the state by them
    reference = {name: nn.Parameter(tensor.clone()) for name, tensor in before.items()}
    groups = [
        {"params": [p for p in reference.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in reference.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=optimizer.BETAS)
    for factor in (1.0, 0.5):
        for parameter in reference.values():
            parameter.grad = factor * parameter.detach().sin()
        adamw.step()
    for name, parameter in reference.items():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-6, atol=1e-7)
