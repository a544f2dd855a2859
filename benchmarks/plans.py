"""What `benchmarks.throughput` measures under each condition, in the order of importance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.loops import ACCELERATE, AWS_SAMPLE, OURS, Workload
from training.config import TrainingConfig

L4_MEMORY_GB = 22


@dataclass(frozen=True)
class Trial:
    """One loop at one setting.

    Attributes:
        name: which loop.
        batch_size: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
        ours: fields of `TrainingConfig` in which our loop differs from the plain setting.
    """

    name: str
    batch_size: int
    seq_len: int
    ours: dict[str, Any] = field(default_factory=dict)

    @property
    def num_micro_batches(self) -> int:
        return self.ours.get("gradient_accumulation", 1)

    @property
    def settings(self) -> str:
        """The differences in words, for tables."""
        return " ".join(f"{name}={value}" for name, value in self.ours.items())

    def workload(self, model: str, device_type: str) -> Workload:
        """What the loop is built from."""
        fields = {"gradient_accumulation": 1, "activation_memory": "none"} | self.ours
        config = TrainingConfig(
            model_id=model,
            device=device_type,
            num_workers=0 if device_type == "cuda" else 1,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            **fields,
        )
        return Workload(model, self.batch_size, self.seq_len, self.num_micro_batches, config)


def _all(batch_size: int, seq_len: int, **ours: Any) -> list[Trial]:
    return [
        Trial(OURS, batch_size, seq_len, ours),
        Trial(AWS_SAMPLE, batch_size, seq_len),
        Trial(ACCELERATE, batch_size, seq_len),
    ]


# Four layers a unit: the same bytes in fewer collectives, which costs the CPU less.
PLAIN = [
    *_all(4, 2048, layers_per_unit=4),
    *_all(8, 2048, layers_per_unit=4),
    *_all(1, 128, layers_per_unit=7),
    *_all(16, 2048, layers_per_unit=4),
    Trial(OURS, 16, 2048, {"layers_per_unit": 4, "gradient_accumulation": 4}),
    Trial(OURS, 4, 2048, {"layers_per_unit": 4, "gradient_accumulation": 4}),
]

# Two ranks hold half of the states each, where the product's four hold a quarter: activations get less.
_TIGHT = {"activation_memory": "0.25", "reshard_after_forward": True}
CAP_22GB = [
    Trial(OURS, 4, 2048, _TIGHT),
    Trial(OURS, 8, 2048, {"activation_memory": "full", "reshard_after_forward": True}),
    Trial(OURS, 1, 2048, _TIGHT),
    Trial(AWS_SAMPLE, 1, 2048),
    Trial(ACCELERATE, 1, 2048),
    Trial(AWS_SAMPLE, 2, 2048),
    Trial(AWS_SAMPLE, 4, 2048),
]

SLOW_NETWORK = [
    Trial(OURS, 4, 2048, {"reduce_dtype": "bfloat16", "layers_per_unit": 4, "gradient_accumulation": 8}),
    Trial(AWS_SAMPLE, 4, 2048),
    Trial(ACCELERATE, 4, 2048),
    Trial(OURS, 4, 2048, {"layers_per_unit": 4, "gradient_accumulation": 8}),
    Trial(OURS, 4, 2048, {"reduce_dtype": "bfloat16", "layers_per_unit": 4}),
    Trial(AWS_SAMPLE, 1, 128),
    Trial(OURS, 1, 128, {"reduce_dtype": "bfloat16", "layers_per_unit": 7}),
    Trial(OURS, 4, 2048, {"sharding": "full"}),
]

# Values from the steps of the compiler's choice (`training.cost_model.BUDGET_STEPS`), and twice the batch.
ACTIVATION_MEMORY = [
    Trial(OURS, 4, 2048, {"activation_memory": amount})
    for amount in ("none", "0.7", "0.6", "0.5", "0.3", "0.25", "full")
] + [Trial(OURS, 8, 2048, {"activation_memory": "0.25"})]

CONDITIONS = {
    "plain": PLAIN,
    "cap-22gb": CAP_22GB,
    "slow-network": SLOW_NETWORK,
    "activation-memory": ACTIVATION_MEMORY,
}
DESCRIPTIONS = {
    "plain": "ranks connected as the machine connects them",
    "cap-22gb": "22 GB of memory per rank, whatever the number of ranks",
    "slow-network": "each rank a host of its own (NCCL_HOSTID), TCP over the loopback interface between them",
    "activation-memory": "our loop, with what it keeps for the backward pass and what it computes again",
}
