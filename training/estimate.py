"""From a job's configuration to what it will cost: joins `training.config` and `training.cost_model`.

The loop asks `memory_warning` before its first step; `training.predict` and the benchmarks ask for the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from training import cost_model
from training.config import TrainingConfig, activation_budget, flag
from training.cost_model import Cluster, Load, Rates, Sharding, StepTime
from training.shape import ModelShape

# The two loops whose cost is known: ours, and that of AWS's sample.
OURS, AWS_SAMPLE = "ours", "aws-sample"
# GPU memory traffic per parameter and step: fused fp32 AdamW 28 bytes and clipping 12; unfused bf16 AdamW,
# 21 passes of 2 bytes.
_OPTIMIZER_BYTES = {OURS: 40, AWS_SAMPLE: 42}
_HEADROOM = 0.9


def _trained_shape(shape: ModelShape, loop: str) -> ModelShape:
    """The sample's size-based wrapping puts embedding and head into separate units: they part."""
    return dataclasses.replace(shape, tied=False) if loop == AWS_SAMPLE else shape


def load_of(config: TrainingConfig, world_size: int) -> Load:
    """What one rank computes per optimizer step under `config`."""
    return Load(config.batch_size, config.seq_len, config.num_micro_batches(world_size), _budget(config))


def _budget(config: TrainingConfig) -> float:
    budget = activation_budget(config.activation_memory)
    assert budget is not None  # TrainingConfig has refused what cannot be read
    return budget


def memory_gib(config: TrainingConfig, shape: ModelShape, cluster: Cluster, loop: str = OURS) -> float:
    """Predicted peak of allocated memory per GPU.

    Args:
        config: the job.
        shape: sizes of its model.
        cluster: where its ranks are.
        loop: `OURS` or `AWS_SAMPLE`.
    """
    load, shape = load_of(config, cluster.num_gpus), _trained_shape(shape, loop)
    if loop == AWS_SAMPLE:
        return cost_model.sample_memory_bytes(shape, cluster, load) / 2**30
    hybrid = config.sharding == "hybrid"
    num_bytes = cost_model.our_memory_bytes(shape, cluster, load, hybrid, config.reshard_after_forward)
    return num_bytes / 2**30


def memory_warning(
    config: TrainingConfig, shape: ModelShape, cluster: Cluster, usable_gib: float, loop: str = OURS
) -> str | None:
    """A warning when the job is predicted not to fit, or to leave less than 10% of the memory free.

    Args:
        config: the job.
        shape: sizes of its model.
        cluster: where its ranks are.
        usable_gib: memory of one GPU (`torch.cuda.mem_get_info()[1] / 2**30`, or `hardware.Gpu.usable_gib`).
        loop: `OURS` or `AWS_SAMPLE`.

    Returns:
        One sentence with the setting to change, or None when it fits.
    """
    needed = memory_gib(config, shape, cluster, loop)
    if needed <= _HEADROOM * usable_gib:
        return None
    verdict = (
        "will not fit" if needed > usable_gib else "leaves under 10% free, so allocations may be retried"
    )
    return (
        f"--batch-size {config.batch_size} --seq-len {config.seq_len}: predicted to need {needed:.1f} GiB of "
        f"{usable_gib:.1f} GiB per GPU, which {verdict}; "
        + _memory_remedy(
            config, lambda change: memory_gib(change, shape, cluster, loop) <= _HEADROOM * usable_gib
        )
    )


def _memory_remedy(config: TrainingConfig, fits: Callable[[TrainingConfig], bool]) -> str:
    """The setting to change, by rising cost in speed, as far as the predictor can tell."""
    changes: list[dict[str, Any]] = [{"activation_memory": memory} for memory in _less_memory(config)]
    changes += [{"batch_size": size} for size in range(config.batch_size - 1, 0, -1)]
    changes.append(
        {"activation_memory": "full", "batch_size": 1, "reshard_after_forward": True, "sharding": "full"}
    )
    # The global batch is left out: what fits depends on the micro-batch, and not every size divides it.
    free = dataclasses.replace(config, global_batch_size=0)
    for change in changes:
        if fits(dataclasses.replace(free, **change)):
            return "use " + " ".join(_as_flag(name, value) for name, value in change.items())
    return "use shorter sequences, GPUs with more memory, or more of them"


def _less_memory(config: TrainingConfig) -> list[str]:
    """Values of `activation_memory` under which less is kept, the fastest first."""
    lower = [step.highest_budget for step in cost_model.BUDGET_STEPS if step.highest_budget < _budget(config)]
    return [f"{budget:g}" if budget else "full" for budget in reversed(lower)]


def _as_flag(name: str, value: Any) -> str:
    return flag(name) if value is True else f"{flag(name)} {value}"


def sharding_of(config: TrainingConfig, load: Load, loop: str = OURS) -> Sharding:
    """How weights and gradients travel under `config`."""
    if loop == AWS_SAMPLE:
        return cost_model.sample_sharding(load)
    reduce_bytes = 2 if config.reduce_dtype == "bfloat16" else 4
    return cost_model.our_sharding(
        config.sharding == "hybrid", load, config.reshard_after_forward, reduce_bytes
    )


def predict_time(
    config: TrainingConfig, shape: ModelShape, cluster: Cluster, rates: Rates, loop: str = OURS
) -> StepTime:
    """Predicts a step's time from given rates: also how measured rates are put to the test."""
    load, shape = load_of(config, cluster.num_gpus), _trained_shape(shape, loop)
    sharding = sharding_of(config, load, loop)
    shards = cluster.gpus_per_node if sharding.hybrid else cluster.num_gpus
    optimizer_bytes = _OPTIMIZER_BYTES[loop] * shape.num_parameters() / shards
    return cost_model.step_time(shape, cluster, load, sharding, rates, optimizer_bytes)


def boundary_gb(config: TrainingConfig, shape: ModelShape, cluster: Cluster, loop: str = OURS) -> float:
    """1e9 bytes that leave one node per optimizer step."""
    sharding = sharding_of(config, load_of(config, cluster.num_gpus), loop)
    return cost_model.boundary_bytes(_trained_shape(shape, loop), cluster, sharding) / 1e9


def boundary_gb_by_scheme(shape: ModelShape, cluster: Cluster, load: Load) -> dict[str, float]:
    """1e9 bytes that leave one node per step under each way to shard the same model."""
    k = load.num_micro_batches
    untied = _trained_shape(shape, AWS_SAMPLE)
    schemes = {
        "aws-sample (untied, full shard, bf16)": (untied, cost_model.sample_sharding(load)),
        "full shard, gathered twice, fp32 reduce": (shape, Sharding(False, 2 * k, 2 * k, k)),
        "full shard, gathered twice, bf16 reduce": (shape, Sharding(False, 2 * k, 2 * k, k, reduce_bytes=2)),
        "full shard, kept gathered, fp32 reduce": (shape, Sharding(False, 1, 1, k)),
        "hybrid shard, fp32 reduce": (shape, Sharding(True, 1, 1, k)),
        "hybrid shard, bf16 reduce": (shape, Sharding(True, 1, 1, k, reduce_bytes=2)),
    }
    return {
        name: cost_model.boundary_bytes(of, cluster, sharding) / 1e9
        for name, (of, sharding) in schemes.items()
    }
