"""Fills a sharded model: each rank reads, or draws, the rows of its own shards and nothing else.

Files are mapped, not read as a whole, and one slice of one tensor is in memory at a time. The host's peak
therefore does not grow with the number of ranks, and no device ever holds an unsharded model.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from training.errors import JobError
from training.model import CausalLM

logger = logging.getLogger(__name__)

# Rows that one random generator draws: the finest grain of a shard's boundary that costs nothing.
_BLOCK_ROWS = 256


class Weights(Protocol):
    """Where a model's tensors come from."""

    def rows(self, names: Sequence[str], shape: torch.Size, start: int, stop: int) -> Tensor:
        """Rows start ... stop - 1 of a tensor, on the CPU.

        Args:
            names: what the tensor may be called, the usual name first; a tied weight has several.
            shape: of the whole tensor.

        Raises:
            JobError: there is none of that name and shape.
        """


class RandomWeights:
    """Initial weights of an architecture: normal matrices, norms of one, biases of zero.

    Every block of rows has a generator of its own, so that the weights do not depend on the number of ranks
    and no rank draws what belongs to another.
    """

    def __init__(self, seed: int, std: float) -> None:
        self._seed, self._std = seed, std

    def rows(self, names: Sequence[str], shape: torch.Size, start: int, stop: int) -> Tensor:
        if len(shape) == 1:
            return torch.full((stop - start,), 0.0 if names[0].endswith("bias") else 1.0)
        first, last = start // _BLOCK_ROWS, -(-stop // _BLOCK_ROWS)
        blocks = torch.cat([self._block(names[0], block, shape[1:]) for block in range(first, last)])
        return blocks[start - first * _BLOCK_ROWS :][: stop - start]

    def _block(self, name: str, block: int, row_shape: torch.Size) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        return torch.empty(_BLOCK_ROWS, *row_shape).normal_(0.0, self._std, generator=generator)


class FileWeights:
    """A folder as Hugging Face writes it: safetensors or PyTorch files, one or several with an index."""

    def __init__(self, folder: str | Path) -> None:
        """
        Args:
            folder: holds the files.

        Raises:
            JobError: no weights in the folder, or a file that cannot be read.
        """
        self._folder = Path(folder)
        files = [_open(path) for path in _weight_files(self._folder)]
        self._holders = {name: file for file in files for name in file.names}

    def rows(self, names: Sequence[str], shape: torch.Size, start: int, stop: int) -> Tensor:
        for name in names:
            if name in self._holders:
                return self._checked(name, shape, start, stop)
        raise JobError(f"{self._folder}: the files lack the tensor {names[0]}; they are not of this model")

    def _checked(self, name: str, shape: torch.Size, start: int, stop: int) -> Tensor:
        file = self._holders[name]
        if (found := file.shape(name)) != tuple(shape):
            raise JobError(
                f"{self._folder}: tensor {name} is {list(found)}, but config.json describes {list(shape)}; "
                "weights and config.json do not belong together"
            )
        return file.rows(name, start, stop)


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="pt", device="cpu")
        self.names = list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._file.get_slice(name)[start:stop]


class _PytorchFile:
    def __init__(self, path: Path) -> None:
        self._tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        self.names = list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._tensors[name][start:stop]


def _open(path: Path) -> _SafetensorsFile | _PytorchFile:
    try:
        return _SafetensorsFile(path) if path.suffix == ".safetensors" else _PytorchFile(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise JobError(f"{path}: cannot be read as a weights file ({reason}); copy it again") from None


def _weight_files(folder: Path) -> list[Path]:
    for pattern, single in (("*.safetensors", "model.safetensors"), ("*.bin", "pytorch_model.bin")):
        index = folder / f"{single}.index.json"
        if index.is_file():
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / name for name in sorted(set(named))]
        if (folder / single).is_file():
            return [folder / single]
        if files := sorted(folder.glob(pattern)):
            return files
    raise JobError(f"{folder}: no weights (*.safetensors or *.bin) in this folder")


def load_weights(model: CausalLM, weights: Weights, device: torch.device) -> None:
    """Gives a meta-device model its storage and fills it.

    Args:
        model: sharded by `training.parallel.parallelize`, or whole.
        weights: where the tensors come from.
        device: where the shards live.

    Raises:
        JobError: a tensor is missing or of another shape, or a buffer cannot be rebuilt.
    """
    model.to_empty(device=device)
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        model.hf.tie_weights()  # to_empty makes two of a shared parameter, unless FSDP has taken hold of it
    model.require_tied()
    with torch.no_grad():
        _rebuild_buffers(model)
        for names, tensor in _unique_tensors(model.hf):
            _fill(tensor, names, weights)
    model.require_tied()


def _unique_tensors(hf: PreTrainedModel) -> list[tuple[list[str], Tensor]]:
    """Parameters and saved buffers, each once, with all its names."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for name, buffer in hf.named_buffers():
        owner, _, short = name.rpartition(".")
        if short not in hf.get_submodule(owner)._non_persistent_buffers_set:
            names[buffer] = [name]
    # Files of a model that was saved without its head (GPT-2's on the hub) leave this prefix out.
    prefix = hf.base_model_prefix + "."
    return [
        (aliases + [alias.removeprefix(prefix) for alias in aliases], tensor)
        for tensor, aliases in names.items()
    ]


def _fill(tensor: Tensor, names: Sequence[str], weights: Weights) -> None:
    if not isinstance(tensor, DTensor):
        tensor.copy_(weights.rows(names, tensor.shape, 0, len(tensor)))
        return
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if shape[0]:  # a tensor with fewer rows than ranks leaves some ranks without any
        tensor.to_local().copy_(weights.rows(names, tensor.shape, offset[0], offset[0] + shape[0]))


def _rebuild_buffers(model: CausalLM) -> None:
    """Computes buffers that no file holds (rotary frequencies), as Transformers does after meta construction.

    Whatever its initialization leaves untouched would silently be garbage. So it runs twice, over different
    garbage: a buffer that differs afterwards was not computed.
    """
    _initialize_buffers(model.hf, garbage=0)
    first = {name: buffer.clone() for name, buffer in _unsaved_buffers(model.hf)}
    _initialize_buffers(model.hf, garbage=1)
    for name, buffer in _unsaved_buffers(model.hf):
        if not torch.equal(first[name], buffer):
            raise JobError(
                f"model type {model.hf.config.model_type}: buffer {name} is in no file and Transformers does "
                "not say how to compute it; this architecture is not supported"
            )


def _initialize_buffers(hf: PreTrainedModel, garbage: int) -> None:
    for _, buffer in _unsaved_buffers(hf):
        buffer.fill_(garbage)
    for module in hf.modules():
        if module._non_persistent_buffers_set:
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # Transformers' own sign to leave a parameter alone
            hf._init_weights(module)


def _unsaved_buffers(hf: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{name}.{short}", module._buffers[short])
        for name, module in hf.named_modules()
        for short in sorted(module._non_persistent_buffers_set)
        if module._buffers[short] is not None
    ]
