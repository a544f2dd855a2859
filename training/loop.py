"""What each rank does, from the placement of the ranks to the summary, under Ray Train and torchrun alike."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig as HfConfig

from training import data, handshake, hanging, metrics
from training.agreement import Agreement
from training.attention import attention_backend
from training.config import TrainingConfig
from training.cost_model import Cluster
from training.diagnosis import Stage, explained
from training.download import model_folder
from training.errors import JobError
from training.estimate import memory_warning
from training.feed import Feed
from training.loading import load_model
from training.model import CausalLM, check_context, named_architecture, read_config
from training.parallel import build_mesh, effective_activation_memory, is_compiled
from training.shape import ModelShape
from training.steps import Steps
from training.weights import FileWeights, RandomWeights, Weights
from training.worker import Worker

logger = logging.getLogger(__name__)


def train(config: TrainingConfig, worker: Worker) -> dict[str, Any]:
    """Runs the whole job on one rank.

    Args:
        config: what to train and how; the same on every rank.
        worker: this rank. The default process group exists.

    Returns:
        The summary, JSON-ready, the same on every rank.

    Raises:
        UsageError: the configuration does not fit the model or the number of workers.
        JobError: the run cannot go on; see `training.errors` for its kinds.
    """
    stage = Stage()
    with explained(worker, config, stage), hanging.watched(worker, config, stage):
        # 1. Where the ranks are, and the mesh over them.
        agreement = Agreement(config.collective_timeout_s)
        nodes = agreement.gather(worker.node)
        mesh = build_mesh(nodes, config, worker.device.type)
        # 2. The network between them is the one that is asked for, before anything is downloaded.
        stage.name = "the transport check"
        transport = handshake.prove(mesh, config, worker)
        # 3. What the model is, and where its weights come from.
        stage.name = "fetching the model"
        found = _find_model(config, worker, agreement)
        warnings = _memory_warnings(config, worker, mesh, found.shape)
        # 4. The data of this rank.
        stage.name = "opening the data"
        feed = _open_data(config, worker, found, agreement)
        # 5. The model, sharded, then filled shard by shard.
        stage.name = "loading the model"
        load = partial(load_model, found.hf_config, found.weights, mesh, config, worker.device)
        model = agreement.together(load)
        about = _about_job(config, worker, mesh, nodes, found.shape, model)
        # 6. Optimizer and steps.
        steps = Steps(config, worker, agreement, stage, found.shape)
        steps.run(model, feed)
        # 7. The network once more: communicators made since then can differ.
        stage.name = "the final transport check"
        transport = {**transport, "confirmed": handshake.confirm(mesh, config, worker)}
        # 8. What came of it.
        stage.name = "the summary"
        memory = metrics.highest(agreement.gather(metrics.memory(worker.device)))
    return {**about, **steps.summary(), "warnings": warnings, "memory": memory, "transport": transport}


@dataclass(frozen=True)
class _Model:
    """What is known of the model before it is built."""

    hf_config: HfConfig
    shape: ModelShape
    weights: Weights


def _find_model(config: TrainingConfig, worker: Worker, agreement: Agreement) -> _Model:
    folder = None
    if named_architecture(config.model_id) is None:
        folder = model_folder(config, agreement, is_first_of_node=worker.local_rank == 0)
    return agreement.together(partial(_describe, config, folder))


def _describe(config: TrainingConfig, folder: str | None) -> _Model:
    hf_config = read_config(folder) if folder else named_architecture(config.model_id)
    check_context(hf_config, config)
    try:
        shape = ModelShape.from_hf_config(hf_config)
    except ValueError as error:
        raise JobError(f"--model-id {config.model_id}: {error}") from None
    weights = FileWeights(folder) if folder else RandomWeights(config.seed, hf_config.initializer_range)
    return _Model(hf_config, shape, weights)


def _memory_warnings(
    config: TrainingConfig, worker: Worker, mesh: DeviceMesh, shape: ModelShape
) -> list[str]:
    """What the predictor has to say before the first step; nothing on a CPU."""
    if worker.device.type != "cuda":
        return []
    num_rows = mesh.shape[0] if mesh.ndim == 2 else 1
    usable_gib = torch.cuda.mem_get_info(worker.device)[1] / metrics.GIB
    warning = memory_warning(config, shape, Cluster(num_rows, mesh.shape[-1]), usable_gib)
    if warning is None:
        return []
    if worker.rank == 0:
        logger.warning(warning)
    return [warning]


def _open_data(config: TrainingConfig, worker: Worker, found: _Model, agreement: Agreement) -> Feed:
    vocab_size = found.hf_config.get_text_config().vocab_size
    open_batches = partial(data.batches, config, vocab_size, worker.rank, worker.world_size)
    batches = agreement.together(open_batches)
    num_micro_batches = config.num_micro_batches(worker.world_size)
    return Feed(batches, config, vocab_size, num_micro_batches, worker.device)


def _about_job(
    config: TrainingConfig,
    worker: Worker,
    mesh: DeviceMesh,
    nodes: list[str],
    shape: ModelShape,
    model: CausalLM,
) -> dict[str, Any]:
    device = worker.device
    about = {
        "model_id": config.model_id,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "world_size": worker.world_size,
        "num_ranks_per_node": dict(Counter(nodes)),
        "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "compiled": is_compiled(config, device.type),
        "activation_memory": effective_activation_memory(config, device.type),
        "attention_backend": attention_backend(shape, config.seq_len, device),
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
    }
    if worker.rank == 0:
        logger.info(", ".join(f"{name} {value}" for name, value in about.items()))
    return about
