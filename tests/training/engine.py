"""A small model on a mesh, in fp32 so that equal means equal: what the tests of the engine share."""

import dataclasses

import torch
from torch.distributed.tensor import DTensor

from training.config import TrainingConfig
from training.loading import load_model
from training.model import named_architecture
from training.parallel import build_mesh
from training.weights import RandomWeights

CONFIG = TrainingConfig(
    model_id="tiny",
    device="cpu",
    num_workers=1,
    batch_size=2,
    seq_len=16,
    gradient_accumulation=1,
    activation_memory="none",
    learning_rate=1e-3,
    warmup_steps=0,
    collective_timeout_s=60,
)
TINY = named_architecture("tiny")


def configured(**changes):
    return dataclasses.replace(CONFIG, **changes)


def tiny_model(worker, nodes, config, param_dtype=torch.float32, hf_config=TINY, weights=None):
    """The model on this rank, over a mesh of ranks on these nodes."""
    mesh = build_mesh(nodes, config, "cpu")
    weights = weights or RandomWeights(config.seed, TINY.initializer_range)
    return load_model(hf_config, weights, mesh, config, worker.device, param_dtype)


def micro_batches(num, batch_size=2, seq_len=16, seed=7, vocab_size=259):
    """As many pairs of inputs and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(num):
        ids = torch.randint(0, vocab_size, (batch_size, seq_len + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
        pairs.append((ids[:, :-1].contiguous(), labels))
    return pairs


def whole(tensor):
    """The unsharded tensor. Every rank calls this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters(model):
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def gradients(model):
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def relative_error(actual, expected):
    """Largest relative difference of norms over tensors of the same name.

    A tensor that is zero but for rounding (the gradient of a key's bias without rotary embedding) is compared
    with the others.
    """
    assert list(actual) == list(expected)
    floor = 1e-4 * max(tensor.norm() for tensor in expected.values())
    return max(
        ((actual[n] - expected[n]).norm() / expected[n].norm().clamp(min=floor)).item() for n in expected
    )
