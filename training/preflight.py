"""What can be known to be wrong before any worker starts: the model and the text.

Each check returns sentences in the form of `training.config.UsageError.problems`: flag, value, remedy.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from training.config import TrainingConfig
from training.data import (
    NAMED_ARCHITECTURES,
    PYTHON_PREFIX,
    load_function,
    read_tokens,
    tokenizer,
    too_few_tokens,
)
from training.errors import DataError
from training.storage import one_line

HUB_TIMEOUT_S = 10

# What model families call the longest sequence they were built for (GPT-2: n_positions, MPT: max_seq_len).
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_HUB_ID = r"[\w.-]+(/[\w.-]+)?"


def check_model(config: TrainingConfig) -> list[str]:
    """The model can be found, has weights where that can be seen, and its context holds `seq_len` tokens."""
    if config.model_id in NAMED_ARCHITECTURES:
        return _named_architecture_is_too_short(config)
    if os.path.isdir(config.model_id):
        path, problem = os.path.join(config.model_id, "config.json"), _missing_file(config.model_id)
    else:
        path, problem = _from_hub(config.model_id, config.model_revision)
    if problem:
        return [f"--model-id {config.model_id}: {problem}"]
    try:
        with open(path, encoding="utf-8") as stream:
            described = json.load(stream)
    except (OSError, ValueError) as error:
        return [f"--model-id {config.model_id}: config.json cannot be read: {one_line(error)}"]
    return _context_is_too_short(config, described)


def _named_architecture_is_too_short(config: TrainingConfig) -> list[str]:
    from training.model import named_architecture  # imports torch and Transformers: seconds

    return _context_is_too_short(config, named_architecture(config.model_id).to_dict())


def _context_is_too_short(config: TrainingConfig, described: dict[str, Any]) -> list[str]:
    context = context_length(described)
    if context is None or config.seq_len <= context:
        return []
    remedy = f"{config.model_id} was built for at most {context} tokens; use that or less"
    return [f"--seq-len {config.seq_len}: {remedy}"]


def context_length(described: dict[str, Any]) -> int | None:
    """Tokens that a model's config.json says it can attend to; None when it does not say."""
    for part in (described, described.get("text_config", {})):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int):
                return part[key]
    return None


def _missing_file(folder: str) -> str | None:
    """What a local model folder lacks, else None."""
    files = set(os.listdir(folder))
    if "config.json" not in files:
        return "the folder has no config.json; give a folder written by save_pretrained"
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if index in files:
            with open(os.path.join(folder, index), encoding="utf-8") as stream:
                missing = sorted(set(json.load(stream)["weight_map"].values()) - files)
            return f"{index} names {', '.join(missing)}, which the folder lacks" if missing else None
    if not any(re.fullmatch(r".+\.(safetensors|bin)", name) for name in files):
        return "the folder has no weights (*.safetensors or *.bin)"
    return None


def _from_hub(model_id: str, revision: str) -> tuple[str, str | None]:
    """Local path of the model's config.json, or why it cannot be had. Asks the hub once, without retries."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if not re.fullmatch(_HUB_ID, model_id) or model_id.startswith("."):
        return "", "no such folder"
    if isinstance(cached := try_to_load_from_cache(model_id, "config.json", revision=revision), str):
        return cached, None
    try:
        get_hf_file_metadata(hf_hub_url(model_id, "config.json", revision=revision), timeout=HUB_TIMEOUT_S)
        return hf_hub_download(model_id, "config.json", revision=revision, etag_timeout=HUB_TIMEOUT_S), None
    except GatedRepoError:
        return "", "the model is gated; accept its terms on the hub and set HF_TOKEN"
    except RevisionNotFoundError:
        return "", f"the hub has no revision {revision} of it; set --model-revision"
    except RepositoryNotFoundError:
        return "", "neither a folder here nor a model on the hub (a private one needs HF_TOKEN)"
    except Exception as error:  # httpx's, huggingface_hub's and the file system's have no common base
        reason = f"not a folder here, and the model hub cannot be reached ({one_line(error)})"
        return "", f"{reason}; give a local folder"


def check_data(config: TrainingConfig, world_size: int) -> list[str]:
    """The text can be read, is UTF-8, and fills one batch on each worker. Reads only as much as that takes.

    Args:
        config: the run's configuration.
        world_size: number of workers.
    """
    if not config.data:
        return []
    try:
        if config.data.startswith(PYTHON_PREFIX):
            load_function(config.data)
            return []
        needed = config.batch_size * world_size * config.seq_len + 1
        tokens = read_tokens(config.data, tokenizer(config), at_most=needed)
    except DataError as error:
        return [f"--data {error}"]
    problem = too_few_tokens(config, len(tokens), world_size)
    return [f"--data {problem}"] if problem else []
