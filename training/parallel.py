"""How the model is spread over the ranks: the mesh from where they really are, and FSDP2 over it.

Hybrid sharding keeps the shards of a model inside a node and replicates them across nodes: gathering weights
and scattering gradients stay on the node's own links, and one all-reduce of shards a step crosses nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from training.config import TrainingConfig, activation_budget
from training.errors import JobError
from training.model import CausalLM

REPLICATE, SHARD = "replicate", "shard"


def rank_grid(nodes: Sequence[str], sharding: str, on_uneven_placement: str) -> list[list[int]]:
    """Which ranks share shards and which hold the same one.

    Args:
        nodes: the node of each rank, in rank order. Ranks of one node need not be neighbours.
        sharding: "hybrid" or "full".
        on_uneven_placement: "fail" or "full", for hybrid sharding over nodes with unequal numbers of ranks.

    Returns:
        Rows of ranks: a row shards one copy of the model. Hybrid: one row a node. Full: one row of all ranks,
        ordered by node, so that a ring over the row crosses from node to node as rarely as it can.

    Raises:
        JobError: nodes hold unequal numbers of ranks, and `on_uneven_placement` is "fail".
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    rows = list(by_node.values())
    if sharding == "hybrid" and len({len(row) for row in rows}) == 1:
        return rows
    if sharding == "hybrid" and on_uneven_placement == "fail":
        raise JobError(_uneven(Counter(nodes)))
    return [[rank for row in rows for rank in row]]


def _uneven(num_ranks: Counter[str]) -> str:
    placed = ", ".join(f"{count} on {node}" for node, count in num_ranks.items())
    return (
        f"the workers cannot form a mesh for hybrid sharding, which needs as many on each node: {placed}. "
        "Free the missing GPUs or choose --num-workers so that every node gets the same number, or allow "
        "full sharding with --on-uneven-placement full (more traffic between nodes)"
    )


def build_mesh(nodes: Sequence[str], config: TrainingConfig, device_type: str) -> DeviceMesh:
    """The device mesh of this job, with its groups' timeouts set.

    Every rank calls this with the same arguments, after the default process group exists.

    Args:
        nodes: the node of each rank, in rank order.
        config: `sharding`, `on_uneven_placement` and `collective_timeout_s` are read.
        device_type: "cuda" or "cpu".

    Returns:
        A mesh with the dimensions (replicate, shard), or only (shard,) where there is nothing to replicate.

    Raises:
        JobError: see `rank_grid`.
    """
    grid = rank_grid(nodes, config.sharding, config.on_uneven_placement)
    if len(grid) == 1:
        mesh = DeviceMesh(device_type, grid[0], mesh_dim_names=(SHARD,))
    else:
        mesh = DeviceMesh(device_type, grid, mesh_dim_names=(REPLICATE, SHARD))
    _limit_waiting(mesh, timedelta(seconds=config.collective_timeout_s))
    return mesh


def _limit_waiting(mesh: DeviceMesh, timeout: timedelta) -> None:
    """DeviceMesh gives its groups PyTorch's default timeout and has no argument for another."""
    for group in (None, *mesh.get_all_groups()):
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def parallelize(
    model: CausalLM, mesh: DeviceMesh, config: TrainingConfig, param_dtype: torch.dtype = torch.bfloat16
) -> None:
    """Prepares a model, in place, to be trained over `mesh`; parameters keep their names.

    In this order, since each wraps what the one before left: recompute activations, compile, shard. Layers
    become FSDP units of `layers_per_unit`; embedding, last norm and head belong to the root unit together
    with the loss, so that a weight shared by embedding and head is gathered once and stays one parameter.

    Args:
        model: with fp32 parameters, on any device, the meta device included.
        mesh: from `build_mesh`.
        config: `activation_memory`, `compile`, `layers_per_unit`, `reshard_after_forward` and `reduce_dtype`
            are read.
        param_dtype: type in which weights are gathered and computed with. The shards stay fp32.
    """
    prepare_layers(model, config, mesh.device_type)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=getattr(torch, config.reduce_dtype))
    shard = partial(
        fully_shard, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward
    )
    layers = list(model.layers)
    for first in range(0, len(layers), config.layers_per_unit):
        unit = layers[first : first + config.layers_per_unit]
        shard(unit if len(unit) > 1 else unit[0])
    # Backward begins where forward ends, in the root: freeing its weights in between would only gather twice.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    layers[-1].register_forward_hook(lambda *_: _free_reduced_gradients(model))


def _free_reduced_gradients(model: nn.Module) -> None:
    """Gives back the unsharded gradient that the micro-batch before reduced last: the embedding's, in fp32.

    FSDP keeps the input of a reduce-scatter until it needs the next one's. Between micro-batches that is a
    whole forward later, past the step's peak of memory at the loss. By the end of the layers it has long been
    sent: to wait for it there costs nothing, where to wait for it between micro-batches would leave the GPU
    idle. FSDP has no public call for this (`_root_post_backward_final_callback` in
    torch.distributed.fsdp._fully_shard does the same after a step's last micro-batch).
    """
    state = model._get_fsdp_state()
    context, stream = state._comm_ctx, state._device_handle.current_stream()
    if hasattr(context, "reduce_scatter_states"):
        inputs = list(context.reduce_scatter_states)
        context.reduce_scatter_states.clear()
    else:  # PyTorch 2.11
        inputs, context.reduce_scatter_state = [context.reduce_scatter_state], None
    for each in inputs:
        if each is not None and each.event is not None:
            stream.wait_event(each.event)


def prepare_layers(model: CausalLM, config: TrainingConfig, device_type: str) -> None:
    """Recomputes activations and compiles, in place, as far as the configuration says so for this device.

    Args:
        model: not sharded yet.
        config: `activation_memory` and `compile` are read.
        device_type: "cuda" or "cpu".
    """
    _save_activation_memory(model, effective_activation_memory(config, device_type))
    if is_compiled(config, device_type):
        _compile(model)


def is_compiled(config: TrainingConfig, device_type: str) -> bool:
    """Whether layers are compiled on this kind of device."""
    return config.compile == "on" or (config.compile == "auto" and device_type == "cuda")


def effective_activation_memory(config: TrainingConfig, device_type: str) -> str:
    """What `activation_memory` comes to: a budget is the compiler's; without it every layer is recomputed."""
    if 0 < activation_budget(config.activation_memory) < 1 and not is_compiled(config, device_type):
        return "full"
    return config.activation_memory


def _save_activation_memory(model: CausalLM, activation_memory: str) -> None:
    if activation_memory == "full":
        for layer in model.layers:
            layer.forward = _recomputed(layer.forward)
    # Read by the compiler when a layer first runs; 1.0, its default, keeps everything.
    budget = 1.0 if activation_memory == "full" else activation_budget(activation_memory)
    torch._functorch.config.activation_memory_budget = budget


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that keeps only its inputs, and runs again in the backward pass."""

    def forward_again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return forward_again


def _compile(model: CausalLM) -> None:
    # Only architectures we have read are promised to be one graph; others may break into several.
    compile_one = partial(torch.compile, fullgraph=model.is_tuned, dynamic=False)
    for layer in model.layers:
        layer.forward = compile_one(layer.forward)
    if model.last_norm is not None:
        model.last_norm.forward = compile_one(model.last_norm.forward)
    model.compile_loss = True


def accumulate(model: nn.Module, is_last: bool, keeps_parameters: bool) -> None:
    """Tells FSDP which micro-batch of a step comes next.

    Until the last one, gradients are reduced inside the shard group only (nothing crosses nodes with hybrid
    sharding) and gathered parameters are kept for the next micro-batch.

    Args:
        model: the root that `parallelize` made.
        is_last: whether this micro-batch is the step's last.
        keeps_parameters: keep parameters gathered between micro-batches; costs their memory.
    """
    model.set_is_last_backward(is_last)
    model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or not keeps_parameters)
