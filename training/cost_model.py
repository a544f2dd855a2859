"""What one optimizer step costs: bytes between nodes, memory per GPU, seconds. Arithmetic, no measurement.

Two training loops are described: ours, and that of AWS's sample "Multi-Node Ray Train on EKS" (FSDP1 with
size-based wrapping, everything in bf16, head untied from the embedding, full logits). Constants that are not
derived from the model's shape were fitted to runs of Qwen2.5-1.5B on 2 x NVIDIA H200; each says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from training.shape import ModelShape

# Of a phase's shorter side (arithmetic or communication), the share that hides behind the longer one.
# Perfect prefetching would be 1, none 0. The published 0.5173 steps/s and the H200 runs over a slow network
# do not tell 0.3 from 0.7: communication dominates them.
OVERLAP = 0.5
# Bytes of weights read or written per parameter in forward and backward (three passes over bf16 weights):
# the least time of a micro-batch, however few its tokens.
_WEIGHT_PASSES_BYTES = 6
# Tokens whose logits exist at one time (training.loss.CHUNK_TOKENS, which imports torch).
LOGITS_CHUNK_TOKENS = 2048
# What is left of the measured peaks after everything derived is subtracted: workspaces of kernels, norms,
# allocator rounding. Fitted, 2 x H200, five configurations.
_WORKSPACE_BYTES = 0.3e9


@dataclass(frozen=True)
class Cluster:
    """Where the ranks are.

    Attributes:
        num_nodes: nodes; each holds the same number of ranks.
        gpus_per_node: ranks on each.
    """

    num_nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node


@dataclass(frozen=True)
class Load:
    """What one rank computes in one optimizer step.

    Attributes:
        batch_size: sequences of one micro-batch.
        seq_len: tokens of one sequence.
        num_micro_batches: micro-batches of one step.
        activation_budget: 1 keeps all activations, 0 recomputes all, between them the compiler chooses.
    """

    batch_size: int
    seq_len: int
    num_micro_batches: int
    activation_budget: float = 1.0

    @property
    def micro_batch_tokens(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def step_tokens(self) -> int:
        return self.micro_batch_tokens * self.num_micro_batches


@dataclass(frozen=True)
class Sharding:
    """How weights and gradients travel.

    Attributes:
        hybrid: shard inside a node and replicate across nodes; else shard over all ranks.
        num_layer_gathers: times the layers' weights are gathered in one step.
        num_root_gathers: times everything outside the layers (embedding, head, last norm) is.
        num_reduces: times gradients are reduce-scattered in one step.
        gather_bytes: bytes of one gathered weight.
        reduce_bytes: bytes of one reduced gradient.
    """

    hybrid: bool
    num_layer_gathers: int
    num_root_gathers: int
    num_reduces: int
    gather_bytes: int = 2
    reduce_bytes: int = 4


def our_sharding(hybrid: bool, load: Load, reshard_after_forward: bool, reduce_bytes: int) -> Sharding:
    """Traffic of `training.step`.

    Weights stay gathered for the whole step; or, with `reshard_after_forward`, layers are gathered twice in
    every micro-batch and the root unit (embedding, last norm, loss) once in each.
    """
    k = load.num_micro_batches
    layer_gathers, root_gathers = (2 * k, k) if reshard_after_forward else (1, 1)
    return Sharding(hybrid, layer_gathers, root_gathers, k, reduce_bytes=reduce_bytes)


def sample_sharding(load: Load) -> Sharding:
    """Traffic of the sample's loop: every micro-batch gathers twice and reduces once, in bf16."""
    k = load.num_micro_batches
    return Sharding(False, 2 * k, 2 * k, k, reduce_bytes=2)


# --- bytes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Bytes of one collective over all weights, as the busiest link of each kind carries them.

    Attributes:
        network_bytes: leaving one node.
        intra_bytes: leaving one GPU for another of its node.
    """

    network_bytes: float = 0.0
    intra_bytes: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.network_bytes + other.network_bytes, self.intra_bytes + other.intra_bytes)


def _ring(num_bytes: float, num_ranks: int) -> float:
    """What each link of a ring carries to gather or to reduce-scatter `num_bytes` over `num_ranks`."""
    return num_bytes * (num_ranks - 1) / num_ranks


def _shard_traffic(num_bytes: float, cluster: Cluster, hybrid: bool) -> Traffic:
    """One all-gather or reduce-scatter of `num_bytes` over the ranks that shard."""
    if hybrid or cluster.num_nodes == 1:
        return Traffic(0.0, _ring(num_bytes, cluster.gpus_per_node))
    every_link = _ring(num_bytes, cluster.num_gpus)
    return Traffic(every_link, every_link if cluster.gpus_per_node > 1 else 0.0)


def gather_traffic(shape: ModelShape, cluster: Cluster, sharding: Sharding) -> tuple[Traffic, Traffic]:
    """Traffic of gathering once: the layers, and everything outside them."""
    root_parameters = shape.embedding_parameters * (1 if shape.tied else 2) + shape.hidden_size
    layer_parameters = shape.num_parameters() - root_parameters
    layers = _shard_traffic(layer_parameters * sharding.gather_bytes, cluster, sharding.hybrid)
    root = _shard_traffic(root_parameters * sharding.gather_bytes, cluster, sharding.hybrid)
    return layers, root


def reduce_traffic(shape: ModelShape, cluster: Cluster, sharding: Sharding) -> Traffic:
    """Traffic of reduce-scattering all gradients once."""
    return _shard_traffic(shape.num_parameters() * sharding.reduce_bytes, cluster, sharding.hybrid)


def replica_traffic(shape: ModelShape, cluster: Cluster, sharding: Sharding) -> Traffic:
    """Traffic of the all-reduce between nodes that hybrid sharding makes once a step."""
    if not sharding.hybrid:
        return Traffic()
    return Traffic(2 * _ring(shape.num_parameters() * sharding.reduce_bytes, cluster.num_nodes))


def boundary_bytes(shape: ModelShape, cluster: Cluster, sharding: Sharding) -> float:
    """Bytes that leave one node in one optimizer step (as many arrive).

    Ring collectives: gathering or reduce-scattering P bytes over W ranks sends P (W-1)/W over each link, of
    which one leaves each node; an all-reduce twice that.
    """
    layers, root = gather_traffic(shape, cluster, sharding)
    return (
        sharding.num_layer_gathers * layers.network_bytes
        + sharding.num_root_gathers * root.network_bytes
        + sharding.num_reduces * reduce_traffic(shape, cluster, sharding).network_bytes
        + replica_traffic(shape, cluster, sharding).network_bytes
    )


# --- memory ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetStep:
    """What the compiler makes of activation budgets up to this one, down to the next step's.

    Attributes:
        highest_budget: of the step.
        kept_share: activations kept, 0: only each layer's input, 1: everything.
        recomputed_share: FLOPs computed again, as a share of a layer's forward and backward.
    """

    highest_budget: float
    kept_share: float
    recomputed_share: float


# A layer of Qwen2.5-1.5B under PyTorch 2.13, measured on a CPU (benchmarks/results/activation_memory.json):
# activations are few and large, so that the compiler's choice changes in steps.
BUDGET_STEPS = (
    BudgetStep(0.0, 0.000, 0.235),
    BudgetStep(0.05, 0.044, 0.218),
    BudgetStep(0.1, 0.095, 0.199),
    BudgetStep(0.25, 0.102, 0.196),
    BudgetStep(0.3, 0.299, 0.120),
    BudgetStep(0.35, 0.343, 0.104),
    BudgetStep(0.5, 0.357, 0.098),
    BudgetStep(0.55, 0.525, 0.034),
    BudgetStep(0.6, 0.598, 0.006),
    BudgetStep(0.65, 0.613, 0.000),
    BudgetStep(0.95, 0.657, 0.000),
    BudgetStep(1.0, 1.000, 0.000),
)


def budget_step(budget: float) -> BudgetStep:
    """The step that an activation budget, 0 ... 1, belongs to."""
    return next(step for step in BUDGET_STEPS if budget <= step.highest_budget)


def activation_bytes_per_token(shape: ModelShape, budget: float) -> float:
    """Bytes that one token's activations hold between forward and backward in our loop.

    Everything kept: six hidden-size tensors (input, two norms, queries, attention output, residual), keys and
    values, three MLP-size tensors, in bf16. Everything recomputed: each layer's input.
    """
    per_layer = 6 * shape.hidden_size + 2 * shape.kv_size + 3 * shape.intermediate_size
    everything = 2 * shape.num_layers * per_layer
    inputs_only = 2 * shape.hidden_size * (shape.num_layers + 3)
    return inputs_only + budget_step(budget).kept_share * (everything - inputs_only)


def recompute_slowdown(shape: ModelShape, seq_len: int, budget: float) -> float:
    """Arithmetic of a step with activations recomputed, as a multiple of that without; the head has none."""
    head_share = 6 * shape.embedding_parameters / shape.flops_per_token(seq_len)
    return 1 + budget_step(budget).recomputed_share * (1 - head_share)


def our_memory_bytes(
    shape: ModelShape, cluster: Cluster, load: Load, hybrid: bool, reshard_after_forward: bool
) -> float:
    """Peak of allocated bytes per GPU in our loop, reached where forward ends and the loss is formed.

    fp32 weights and two Adam moments (12 bytes) sharded; gathered bf16 weights; the loss' fp32 and bf16
    gradient of the head and one chunk of fp32 logits with their bf16 gradient; activations. With accumulation
    also the sharded fp32 gradients of earlier micro-batches.
    """
    shards = cluster.gpus_per_node if hybrid else cluster.num_gpus
    parameters = shape.num_parameters()
    embedding = shape.embedding_parameters
    gathered = parameters
    if reshard_after_forward:  # the root and two layers: one in use, one prefetched
        layer = (parameters - embedding) / shape.num_layers
        gathered = embedding + 2 * layer
    logits = 6 * shape.vocab_size * min(LOGITS_CHUNK_TOKENS, load.micro_batch_tokens)
    peak = 12 * parameters / shards + 2 * gathered + 6 * embedding + logits + _WORKSPACE_BYTES
    if load.num_micro_batches > 1:
        peak += 4 * parameters / shards
    return peak + load.micro_batch_tokens * activation_bytes_per_token(shape, load.activation_budget)


def sample_memory_bytes(shape: ModelShape, cluster: Cluster, load: Load) -> float:
    """Peak of allocated bytes per GPU in the sample's loop: the larger of two moments.

    Where forward ends: bf16 weights and moments (6 bytes) sharded, all activations, logits in bf16 and fp32
    with copies and gradients (20 bytes each, fitted to 2 x H200). Where backward ends: gradients too
    (8 bytes), and embedding and head unsharded with their gradients.
    """
    parameters = shape.num_parameters()
    per_token = activation_bytes_per_token(shape, 1.0) + 20.5 * shape.vocab_size
    forward = 6 * parameters / cluster.num_gpus + load.micro_batch_tokens * per_token
    backward = 8 * parameters / cluster.num_gpus + 8 * shape.embedding_parameters
    return max(forward, backward)


# --- time -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """What the hardware sustains.

    Attributes:
        network_gb_per_s: out of one node, in 1e9 bytes a second.
        intra_gb_per_s: NCCL's bus bandwidth inside a node, in 1e9 bytes a second.
        compute_tflops: model FLOPs (`ModelShape.flops_per_token`) per second and GPU without communication,
            recomputation included in the time, in 1e12.
        memory_gb_per_s: the GPU's memory bandwidth, in 1e9 bytes a second.
        host_s: time the host needs to launch one micro-batch's kernels: the least time of one.
    """

    network_gb_per_s: float
    intra_gb_per_s: float
    compute_tflops: float
    memory_gb_per_s: float
    host_s: float


@dataclass(frozen=True)
class StepTime:
    """Where one optimizer step's time goes, in seconds. Parts overlap: they add up to more than `step_s`."""

    step_s: float
    compute_s: float
    network_s: float
    intra_s: float
    optimizer_s: float


def micro_batch_compute_s(shape: ModelShape, load: Load, rates: Rates) -> float:
    """Seconds of arithmetic of one micro-batch: FLOPs, or the reading of the weights if that takes longer."""
    flops = load.micro_batch_tokens * shape.flops_per_token(load.seq_len)
    weights_s = _WEIGHT_PASSES_BYTES * shape.num_parameters() / (rates.memory_gb_per_s * 1e9)
    return max(flops / (rates.compute_tflops * 1e12), weights_s)


def _seconds(traffic: Traffic, rates: Rates) -> float:
    """Links of both kinds work at the same time; the slower one decides."""
    return max(
        traffic.network_bytes / (rates.network_gb_per_s * 1e9),
        traffic.intra_bytes / (rates.intra_gb_per_s * 1e9),
    )


def _together(compute_s: float, communication_s: float) -> float:
    """Time of a phase in which the shorter of the two hides partly behind the longer."""
    return max(compute_s, communication_s) + (1 - OVERLAP) * min(compute_s, communication_s)


def _phases(
    shape: ModelShape, cluster: Cluster, load: Load, sharding: Sharding
) -> Iterator[tuple[bool, Traffic]]:
    """The step's phases in order: whether it is a backward, and what travels during it.

    Gathers come first in forwards, at most one in each, and then in backwards.
    """
    layers, root = gather_traffic(shape, cluster, sharding)
    reduce = reduce_traffic(shape, cluster, sharding)
    k = load.num_micro_batches
    for micro_batch in range(k):
        is_last = micro_batch == k - 1
        forward, backward = Traffic(), reduce
        for unit, num_gathers in ((layers, sharding.num_layer_gathers), (root, sharding.num_root_gathers)):
            forward += unit if micro_batch < num_gathers else Traffic()
            backward += unit if micro_batch < num_gathers - k else Traffic()
        yield False, forward
        yield True, backward + (replica_traffic(shape, cluster, sharding) if is_last else Traffic())


def step_time(
    shape: ModelShape,
    cluster: Cluster,
    load: Load,
    sharding: Sharding,
    rates: Rates,
    optimizer_bytes: float,
) -> StepTime:
    """Predicts one optimizer step, phase by phase; forward is a third of a micro-batch's arithmetic.

    Args:
        optimizer_bytes: memory traffic of clipping and of the optimizer's update, per GPU.
    """
    compute_s = micro_batch_compute_s(shape, load, rates)
    optimizer_s = optimizer_bytes / (rates.memory_gb_per_s * 1e9)
    phases = list(_phases(shape, cluster, load, sharding))
    total = sum((traffic for _, traffic in phases), Traffic())
    device_s = optimizer_s + sum(
        _together(compute_s * (2 if is_backward else 1) / 3, _seconds(traffic, rates))
        for is_backward, traffic in phases
    )
    return StepTime(
        step_s=max(device_s, load.num_micro_batches * rates.host_s),
        compute_s=load.num_micro_batches * compute_s,
        network_s=total.network_bytes / (rates.network_gb_per_s * 1e9),
        intra_s=total.intra_bytes / (rates.intra_gb_per_s * 1e9),
        optimizer_s=optimizer_s,
    )
