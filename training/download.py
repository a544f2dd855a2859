"""One copy of a model on each node: fetched by one of its ranks while the others wait."""

from __future__ import annotations

import os
from functools import partial

from training.agreement import Agreement
from training.config import TrainingConfig
from training.errors import JobError

# Configuration and tokenizer beside the weights; nothing of other frameworks.
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_WEIGHT_FILES = ("*.safetensors", "*.bin")  # the second only where a model has none of the first


def model_folder(config: TrainingConfig, agreement: Agreement, is_first_of_node: bool) -> str:
    """The folder that holds the model; a model of the hub is downloaded once per node.

    Args:
        config: `model_id` and `model_revision` are read.
        agreement: all ranks call this together.
        is_first_of_node: whether this rank downloads for its node.

    Returns:
        A local folder with config.json and weights.

    Raises:
        JobError: the download failed on some node; every rank raises it.
    """
    if os.path.isdir(config.model_id):
        return config.model_id
    fetch = partial(_download, config.model_id, config.model_revision)
    agreement.wait_for(fetch if is_first_of_node else None)
    return agreement.together(partial(fetch, only_local=True))


def _download(model_id: str, revision: str, only_local: bool = False) -> str:
    # Imported where it is needed: folders and named architectures do without a hub.
    from huggingface_hub import snapshot_download

    try:
        for pattern in _WEIGHT_FILES:
            folder = snapshot_download(
                model_id,
                revision=revision,
                allow_patterns=[*_SMALL_FILES, pattern],
                local_files_only=only_local,
            )
            if any(name.endswith(pattern[1:]) for name in os.listdir(folder)):
                return folder
    except Exception as error:  # httpx's, huggingface_hub's and the file system's have no common base
        raise JobError(_failure(model_id, revision, error)) from None
    raise JobError(f"--model-id {model_id}: the model has no weights (*.safetensors or *.bin) at {revision}")


def _failure(model_id: str, revision: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        f"--model-id {model_id} at revision {revision}: download failed: {reason}. Check the id and "
        "--model-revision, that the nodes reach the hub, and HF_TOKEN for a private or gated model; or give "
        "a local folder"
    )
