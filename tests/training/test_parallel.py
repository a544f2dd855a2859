from collections import Counter

import pytest
import torch
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.engine import (
    configured,
    gradients,
    micro_batches,
    parameters,
    relative_error,
    tiny_model,
)
from tests.training.ranks import run_ranks
from training import optimizer
from training.errors import JobError
from training.parallel import build_mesh, effective_activation_memory, rank_grid
from training.step import train_step

TWO_BY_TWO = ["a", "a", "b", "b"]
EXACT = 1e-6


def test_a_row_holds_the_ranks_of_one_node():
    assert rank_grid(TWO_BY_TWO, "hybrid", "fail") == [[0, 1], [2, 3]]


def test_interleaved_ranks_still_share_shards_inside_their_node():
    assert rank_grid(["a", "b", "a", "b"], "hybrid", "fail") == [[0, 2], [1, 3]]


def test_full_sharding_is_one_row_ordered_by_node():
    assert rank_grid(["a", "b", "a", "b"], "full", "fail") == [[0, 2, 1, 3]]


def test_one_node_has_nothing_to_replicate():
    assert rank_grid(["a"] * 3, "hybrid", "fail") == [[0, 1, 2]]


def test_uneven_placement_is_refused_with_the_count_of_each_node():
    with pytest.raises(JobError, match=r"5 on a, 3 on b.*--num-workers.*--on-uneven-placement full"):
        rank_grid(["a"] * 5 + ["b"] * 3, "hybrid", "fail")


def test_uneven_placement_falls_back_to_full_sharding_when_allowed():
    assert rank_grid(["a", "b", "a"], "hybrid", "full") == [[0, 2, 1]]


def test_a_budget_without_the_compiler_recomputes_every_layer():
    assert effective_activation_memory(configured(activation_memory="0.5"), "cpu") == "full"
    assert effective_activation_memory(configured(activation_memory="0.5", compile="on"), "cpu") == "0.5"
    assert effective_activation_memory(configured(activation_memory="0.5"), "cuda") == "0.5"
    assert effective_activation_memory(configured(activation_memory="none"), "cpu") == "none"


def _mesh_of(worker, nodes, config):
    mesh = build_mesh(nodes, config, "cpu")
    groups = {name: sorted(get_process_group_ranks(mesh.get_group(name))) for name in mesh.mesh_dim_names}
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in mesh.get_all_groups()]
    return groups, {timeout.total_seconds() for timeout in timeouts}


def test_groups_of_an_interleaved_placement_shard_inside_nodes_and_replicate_across():
    nodes = ["a", "b", "a", "b"]
    outcomes = run_ranks(_mesh_of, 4, nodes, configured(collective_timeout_s=45), nodes=nodes)
    groups = [groups for groups, _ in outcomes]
    assert [group["shard"] for group in groups] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [group["replicate"] for group in groups] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def _train(worker, nodes, config, num_micro_batches, num_steps=3):
    """Losses, norms, first gradients and last parameters of some steps over this rank's share of the data."""
    model = tiny_model(worker, nodes, config)
    # Not AdamW: where a gradient is next to nothing, its first step is the sign of a rounding error.
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    first_gradients, losses, norms = None, [], []
    for step in range(num_steps):
        # Twelve sequences a step, whatever the number of ranks and of micro-batches.
        ids, labels = (torch.cat(part) for part in zip(*micro_batches(6, seed=step), strict=True))
        share = slice(worker.rank * 12 // worker.world_size, (worker.rank + 1) * 12 // worker.world_size)
        pieces = zip(ids[share].chunk(num_micro_batches), labels[share].chunk(num_micro_batches), strict=True)
        sgd.zero_grad = lambda set_to_none=True: None  # kept, to be looked at
        result = train_step(model, sgd, list(pieces), config).read()
        losses.append(result.loss)
        norms.append(result.grad_norm)
        first_gradients = first_gradients or gradients(model)
        for parameter in model.parameters():
            parameter.grad = None
    return losses, norms, first_gradients, parameters(model)


def _assert_same(outcomes, expected):
    losses, norms, first_gradients, last_parameters = expected
    for rank_losses, rank_norms, rank_gradients, rank_parameters in outcomes:
        assert rank_losses == pytest.approx(losses, rel=EXACT)
        assert rank_norms == pytest.approx(norms, rel=EXACT)
        assert relative_error(rank_gradients, first_gradients) < EXACT
        assert relative_error(rank_parameters, last_parameters) < EXACT


@pytest.fixture(scope="module")
def one_process():
    """A single process with one micro-batch: what every other arrangement must equal."""
    (outcome,) = run_ranks(_train, 1, ["a"], configured(), 1)
    return outcome


@pytest.mark.parametrize(
    ("nodes", "changes", "num_micro_batches"),
    [
        (TWO_BY_TWO, {"sharding": "hybrid"}, 1),
        (TWO_BY_TWO, {"sharding": "full"}, 1),
        (TWO_BY_TWO, {"sharding": "hybrid"}, 3),
        (["a", "b", "a", "b"], {"sharding": "hybrid", "layers_per_unit": 2}, 3),
        (TWO_BY_TWO, {"sharding": "hybrid", "reshard_after_forward": True, "activation_memory": "full"}, 3),
        (["a", "b", "b"], {"on_uneven_placement": "full"}, 2),
        (["a"], {}, 6),
    ],
    ids=["hybrid", "full", "accumulation", "interleaved", "frugal", "uneven", "one process accumulates"],
)
def test_every_arrangement_equals_one_process(one_process, nodes, changes, num_micro_batches):
    outcomes = run_ranks(_train, len(nodes), nodes, configured(**changes), num_micro_batches, nodes=nodes)
    _assert_same(outcomes, one_process)


def _clip(worker, nodes, max_norm):
    model = tiny_model(worker, nodes, configured())
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.detach()
    norm = optimizer.clip_gradients(model.parameters(), max_norm).item()
    return norm, gradients(model), parameters(model)


def test_clipping_a_sharded_model_equals_clipping_a_whole_one():
    for norm, clipped, weights in run_ranks(_clip, 4, TWO_BY_TWO, 0.5, nodes=TWO_BY_TWO):
        reference = [torch.nn.Parameter(weight) for weight in weights.values()]
        for parameter in reference:
            parameter.grad = 2 * parameter.detach()
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(reference, 0.5).item(), rel=EXACT)
        expected = {name: parameter.grad for name, parameter in zip(weights, reference, strict=True)}
        assert relative_error(clipped, expected) < EXACT


class _Collectives(TorchDispatchMode):
    """Counts collectives by kind and by the ranks that take part."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            handles = (arg for arg in args if isinstance(arg, torch.ScriptObject))
            group = next(
                ProcessGroup.unbox(handle) for handle in handles if "ProcessGroup" in str(handle._type())
            )
            self.counts[operation._schema.name.removeprefix("c10d::"), *get_process_group_ranks(group)] += 1
        return operation(*args, **(kwargs or {}))


def _communicated(worker, nodes, config, num_micro_batches):
    model = tiny_model(worker, nodes, config)
    adamw = optimizer.build(model, config.learning_rate, config.weight_decay)
    with _Collectives() as collectives:
        train_step(model, adamw, micro_batches(num_micro_batches), config)
    return collectives.counts


def test_accumulation_crosses_nodes_once_a_step_and_gathers_weights_once():
    once, four_times = (
        run_ranks(_communicated, 4, TWO_BY_TWO, configured(), num_micro_batches, nodes=TWO_BY_TWO)[0]
        for num_micro_batches in (1, 4)
    )
    num_units = 5  # four layers and the root
    in_node, across, everywhere = (0, 1), (0, 2), (0, 1, 2, 3)
    norm = {("allreduce_", *in_node): 1}
    labels_and_outcome = {("allreduce_", *everywhere): 1, ("allgather_", *everywhere): 1}
    assert once == norm | labels_and_outcome | {
        ("_allgather_base_", *in_node): num_units,
        ("_reduce_scatter_base_", *in_node): num_units,
        ("allreduce_", *across): num_units,
    }
    assert four_times == once | {("_reduce_scatter_base_", *in_node): 4 * num_units}


class _ReduceScatterInputs(TorchDispatchMode):
    """Remembers what was reduce-scattered, without keeping it."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._schema.name == "c10d::_reduce_scatter_base_":
            self.storages.append(StorageWeakRef(args[1].untyped_storage()))
        return operation(*args, **(kwargs or {}))


def _kept_until_the_loss(worker, nodes, config):
    """For each micro-batch of a step, how many inputs of reduce-scatters exist when its loss is formed."""
    model = tiny_model(worker, nodes, config)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, inputs = [], _ReduceScatterInputs()

    def count(*_):
        kept.append(sum(not storage.expired() for storage in inputs.storages))

    model.last_norm.register_forward_hook(count)
    with inputs:
        train_step(model, sgd, micro_batches(3), config)
    return kept, len(inputs.storages)


@pytest.mark.parametrize("sharding", ["hybrid", "full"])
@pytest.mark.parametrize("layers_per_unit", [1, 3])
def test_no_unsharded_gradient_outlives_the_layers_of_the_next_micro_batch(sharding, layers_per_unit):
    config = configured(sharding=sharding, layers_per_unit=layers_per_unit)
    num_units = -(-4 // layers_per_unit) + 1
    for kept, num_reduced in run_ranks(_kept_until_the_loss, 4, TWO_BY_TWO, config, nodes=TWO_BY_TWO):
        assert kept == [0, 0, 0]
        assert num_reduced == 3 * num_units
