"""Compiled layers, with and without recomputation, compute what plain ones do. In a file of its own: slow."""

import copy

import pytest

from tests.training.engine import TINY, configured, gradients, micro_batches, relative_error, tiny_model
from tests.training.ranks import run_ranks
from training import optimizer
from training.step import train_step


def _gradients(worker, nodes, variants):
    hf_config = copy.deepcopy(TINY)
    hf_config.num_hidden_layers, hf_config.layer_types = 2, ["full_attention"] * 2
    found = []
    for changes in variants:
        config = configured(**changes)
        model = tiny_model(worker, nodes, config, hf_config=hf_config)
        adamw = optimizer.build(model, config.learning_rate, config.weight_decay)
        adamw.zero_grad = lambda set_to_none=True: None
        loss = train_step(model, adamw, micro_batches(2), config).read().loss
        found.append((loss, gradients(model)))
    return found


def test_compiled_layers_compute_the_same_at_every_activation_memory():
    plain = {"compile": "off", "activation_memory": "none"}
    compiled = [{"compile": "on", "activation_memory": memory} for memory in ("0.5", "full")]
    ((expected_loss, expected), *others), _ = run_ranks(_gradients, 2, ["a", "a"], [plain, *compiled])
    for loss, found in others:
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert relative_error(found, expected) < 1e-5
