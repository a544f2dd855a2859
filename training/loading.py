"""From a description to a model that can be trained: built without storage, sharded, filled by shards."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig as HfConfig

from training.config import TrainingConfig
from training.model import CausalLM, build
from training.parallel import parallelize
from training.weights import Weights, load_weights


def load_model(
    hf_config: HfConfig,
    weights: Weights,
    mesh: DeviceMesh,
    config: TrainingConfig,
    device: torch.device,
    param_dtype: torch.dtype = torch.bfloat16,
) -> CausalLM:
    """A model on the device, sharded over the mesh, with its weights.

    Args:
        hf_config: what the model is.
        weights: where its tensors come from.
        mesh: from `training.parallel.build_mesh`.
        config: how it is spread and computed.
        device: of this rank.
        param_dtype: type of the computation.

    Raises:
        JobError: unsupported architecture, or weights that do not fit.
    """
    torch.manual_seed(config.seed)  # dropout, where a model has it
    model = build(hf_config)
    parallelize(model, mesh, config, param_dtype)
    load_weights(model, weights, device)
    return model
