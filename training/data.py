"""Batches of token ids: random by default, a text file, or a data set of your own.

**Your own data set.** Write one function and name it on the command line:

    --data python:my_data:batches          (module `my_data`, function `batches`)

    def batches(config, vocab_size, rank, world_size, start_batch=0):
        for ids in my_dataset_of_this_rank(rank, world_size):    # int64 [batch_size, seq_len + 1]
            yield ids[:, :-1], ids[:, 1:]

The contract of that function is the one of `batches` below, and the tests of this module hold for it too:
an endless iterator of `(input_ids, labels)`, both int64 `[config.batch_size, config.seq_len]`, `labels[i]`
the token that follows `input_ids[i]` (-100 where no loss is wanted); every id in `0 .. vocab_size - 1`; ranks
see different sequences and never run dry; the same arguments give the same batches; `start_batch=n` begins
where n calls of `next` would have led, which is how a resumed run goes on. A `torch.utils.data.DataLoader`
over a sharded data set fits behind that signature. The module has to be importable on the workers: put it
beside this one, or into the image.

Failures raise `training.errors.DataError` when `batches` is called, before the first batch is asked for.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from training.config import TrainingConfig
from training.errors import DataError
from training.storage import STORAGE_ERRORS, locate, one_line

Batch: TypeAlias = tuple[Tensor, Tensor]
Tokenize: TypeAlias = Callable[[str], list[int]]

NAMED_ARCHITECTURES = ("tiny", "qwen2.5-1.5b-random")
"""Models without a tokenizer of their own: they read a file byte by byte (256 tokens)."""

PYTHON_PREFIX = "python:"

_LONGEST_LINE = 1 << 22  # characters; a longer line is cut, so that a file without line breaks is no trap


def batches(
    config: TrainingConfig, vocab_size: int, rank: int, world_size: int, start_batch: int = 0
) -> Iterator[Batch]:
    """An endless iterator over the micro-batches of one rank.

    Args:
        config: `data`, `model_id`, `model_revision`, `batch_size`, `seq_len` and `seed` are read.
        vocab_size: number of tokens the model knows; all ids are below it.
        rank: 0 ... world_size - 1.
        world_size: number of ranks; no two see the same sequence in an epoch.
        start_batch: micro-batches of this rank to skip, without the work of making them.

    Returns:
        Pairs (input_ids, labels), int64 [batch_size, seq_len]; labels are the inputs shifted by one.

    Raises:
        DataError: the file cannot be read, is not UTF-8, is too short, or does not fit the vocabulary.
    """
    try:
        if not config.data:
            return _random_batches(config, vocab_size, rank, start_batch)
        if config.data.startswith(PYTHON_PREFIX):
            return load_function(config.data)(config, vocab_size, rank, world_size, start_batch)
        tokens = _checked_tokens(config, vocab_size, world_size)
        return _text_batches(config, tokens, rank, world_size, start_batch)
    except DataError as error:
        raise DataError(f"rank {rank}: {error}") from None


def _checked_tokens(config: TrainingConfig, vocab_size: int, world_size: int) -> np.ndarray:
    tokens = read_tokens(config.data, tokenizer(config))
    if (highest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{config.data} has token id {highest}, but the model knows {vocab_size} tokens; "
            "use the tokenizer that belongs to the model"
        )
    if problem := too_few_tokens(config, len(tokens), world_size):
        raise DataError(problem)
    return tokens


def _pair(windows: np.ndarray) -> Batch:
    """Splits windows [batch_size, seq_len + 1] into inputs and labels."""
    ids = torch.from_numpy(np.ascontiguousarray(windows, dtype=np.int64))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _random_batches(config: TrainingConfig, vocab_size: int, rank: int, start_batch: int) -> Iterator[Batch]:
    shape = (config.batch_size, config.seq_len + 1)
    index = start_batch
    while True:
        # A generator for each batch: skipping costs nothing, and no two batches share one.
        generator = np.random.default_rng([config.seed, rank, index])
        yield _pair(generator.integers(0, vocab_size, shape))
        index += 1


def _text_batches(
    config: TrainingConfig, tokens: np.ndarray, rank: int, world_size: int, start_batch: int
) -> Iterator[Batch]:
    windows = num_windows(len(tokens), config.seq_len)
    per_round = config.batch_size * world_size
    batches_per_epoch = windows // per_round  # the same on every rank; what is left over changes each epoch
    epoch, index = divmod(start_batch, batches_per_epoch)
    offsets = np.arange(config.seq_len + 1)
    while True:
        order = np.random.default_rng([config.seed, epoch]).permutation(windows)
        for batch in range(index, batches_per_epoch):
            first = batch * per_round + rank * config.batch_size
            starts = order[first : first + config.batch_size] * config.seq_len
            yield _pair(tokens[starts[:, None] + offsets])
        epoch, index = epoch + 1, 0


def num_windows(num_tokens: int, seq_len: int) -> int:
    """Sequences in a text: seq_len + 1 tokens each, the last one shared with the next sequence.

    So every token but the first is predicted exactly once in an epoch.
    """
    return max(num_tokens - 1, 0) // seq_len


def too_few_tokens(config: TrainingConfig, num_tokens: int, world_size: int) -> str | None:
    """A sentence with the remedy when a text does not fill one micro-batch on each rank, else None."""
    needed = config.batch_size * world_size
    if num_windows(num_tokens, config.seq_len) >= needed:
        return None
    return (
        f"{config.data} has {num_tokens} tokens, but one batch on each of {world_size} workers takes "
        f"{needed * config.seq_len + 1} ({world_size} x --batch-size {config.batch_size} x --seq-len "
        f"{config.seq_len}, and one more); give more text, or lower --batch-size or --seq-len"
    )


def read_tokens(path: str, tokenize: Tokenize, at_most: int | None = None) -> np.ndarray:
    """Reads and tokenizes a UTF-8 text file.

    Args:
        path: local path or URI.
        tokenize: text -> token ids.
        at_most: stop reading once there are this many tokens; None reads the whole file.

    Returns:
        Token ids, int32 [num_tokens]. The whole file is held in memory at 4 bytes a token, on each rank.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or is empty.
    """
    pieces: list[np.ndarray] = []
    num_tokens = 0
    for piece in _read_pieces(path):
        pieces.append(np.asarray(tokenize(piece), dtype=np.int32))
        num_tokens += len(pieces[-1])
        if at_most is not None and num_tokens >= at_most:
            break
    if not num_tokens:
        raise DataError(f"{path}: the file is empty; give a text to train on")
    return np.concatenate(pieces)


def _read_pieces(path: str) -> Iterator[str]:
    """The text in pieces of about 1 MiB that end with a line, so that tokenizers need little memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    num_bytes = 0
    try:
        for chunk in locate(path).chunks():
            text = rest + decoder.decode(chunk)
            num_bytes += len(chunk)
            cut = text.rfind("\n") + 1 or (len(text) if len(text) > _LONGEST_LINE else 0)
            yield text[:cut]
            rest = text[cut:]
        yield rest + decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = num_bytes - len(decoder.getstate()[0]) + error.start  # the decoder keeps an unfinished character
        raise DataError(f"{path}: not UTF-8 at byte {at} ({error.reason}); convert it to UTF-8") from None
    except STORAGE_ERRORS as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from None


def tokenizer(config: TrainingConfig) -> Tokenize:
    """How the model reads text: its own tokenizer, or bytes for the named architectures.

    Raises:
        DataError: the model has no usable tokenizer.
    """
    if config.model_id in NAMED_ARCHITECTURES:
        return lambda text: list(text.encode())
    from transformers import AutoTokenizer  # costs a second; most runs need none

    reason = "it has none"
    try:
        loaded = AutoTokenizer.from_pretrained(config.model_id, revision=config.model_revision)
        if _encode(loaded, "text"):  # of a folder without tokenizer files, an empty one can come
            return partial(_encode, loaded)
    except Exception as error:  # transformers raises many kinds, ImportError and KeyError among them
        reason = one_line(error)
    raise DataError(
        f"{config.data}: the tokenizer of {config.model_id} cannot be loaded ({reason}); "
        "add its files to the folder, or leave --data out"
    )


def _encode(loaded: Callable[..., dict[str, list[int]]], text: str) -> list[int]:
    return loaded(text, add_special_tokens=False, verbose=False)["input_ids"]


def load_function(data: str) -> Callable[..., Iterator[Batch]]:
    """The function that `python:module:function` names.

    Raises:
        DataError: there is no such module or function.
    """
    module_name, _, name = data.removeprefix(PYTHON_PREFIX).partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise DataError(f"{data}: {one_line(error)}; use python:<module>:<function>") from None
    if not callable(function):
        raise DataError(f"{data}: {name} is not a function; use python:<module>:<function>")
    return function
