"""Batches: what a model may rely on, whatever the source."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from training import data
from training.config import TrainingConfig
from training.errors import DataError
from training.model import named_architecture

VOCAB = 259


def config(**changes: object) -> TrainingConfig:
    return dataclasses.replace(TrainingConfig(model_id="tiny", batch_size=2, seq_len=8), **changes)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """1000 bytes in which each pair of neighbours occurs once at most in a window: order can be seen."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number:04d}\n" for number in range(200)))
    return path


def take(count: int, *args: object, **kwargs: object) -> list[data.Batch]:
    return list(islice(data.batches(*args, **kwargs), count))


def rows(batches: list[data.Batch]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for ids, _ in batches for row in ids]


@pytest.fixture(params=["random", "text"])
def job(request: pytest.FixtureRequest, text: Path) -> TrainingConfig:
    return config(data="" if request.param == "random" else str(text))


def test_a_batch_has_the_shape_and_type_that_the_model_takes(job: TrainingConfig) -> None:
    ids, labels = take(1, job, VOCAB, 0, 2)[0]
    assert ids.shape == labels.shape == (2, 8)
    assert ids.dtype == labels.dtype == torch.int64
    assert int(ids.min()) >= 0 and int(ids.max()) < VOCAB


def test_labels_are_the_tokens_that_follow(job: TrainingConfig) -> None:
    for ids, labels in take(5, job, VOCAB, 0, 2):
        assert torch.equal(ids[:, 1:], labels[:, :-1])


def test_the_same_arguments_give_the_same_batches(job: TrainingConfig) -> None:
    assert rows(take(40, job, VOCAB, 1, 2)) == rows(take(40, job, VOCAB, 1, 2))


def test_another_seed_gives_other_batches(job: TrainingConfig) -> None:
    other = dataclasses.replace(job, seed=1)
    assert rows(take(4, job, VOCAB, 0, 2)) != rows(take(4, other, VOCAB, 0, 2))


@pytest.mark.parametrize("start", [1, 30, 31, 95])
def test_starting_later_gives_what_would_have_come_then(job: TrainingConfig, start: int) -> None:
    whole = rows(take(start + 5, job, VOCAB, 1, 2))
    assert rows(take(5, job, VOCAB, 1, 2, start_batch=start)) == whole[-10:]


def test_random_batches_never_repeat_on_any_rank() -> None:
    seen = [row for rank in range(3) for row in rows(take(50, config(), VOCAB, rank, 3))]
    assert len(set(seen)) == len(seen)


def test_an_epoch_of_text_shows_each_rank_other_sequences_and_none_twice(text: Path) -> None:
    job = config(data=str(text))
    windows = data.num_windows(1000, job.seq_len)
    per_rank = windows // (job.batch_size * 3)
    seen = [row for rank in range(3) for row in rows(take(per_rank, job, VOCAB, rank, 3))]
    assert len(set(seen)) == len(seen) == per_rank * job.batch_size * 3
    assert windows - len(seen) < job.batch_size * 3


def test_the_next_epoch_has_another_order(text: Path) -> None:
    job = config(data=str(text))
    per_epoch = data.num_windows(1000, job.seq_len) // job.batch_size
    both = rows(take(2 * per_epoch, job, VOCAB, 0, 1))
    first, second = both[: len(both) // 2], both[len(both) // 2 :]
    assert first != second
    assert set(first) == set(second)


def test_every_token_but_the_first_is_a_label_once_an_epoch(text: Path) -> None:
    job = config(data=str(text), batch_size=1)
    windows = data.num_windows(1000, job.seq_len)
    labels = [label for _, row in take(windows, job, VOCAB, 0, 1) for label in row.flatten().tolist()]
    content = text.read_bytes()[1 : 1 + windows * job.seq_len]
    assert sorted(labels) == sorted(content)


def test_text_reads_as_its_bytes(text: Path) -> None:
    job = config(data=str(text))
    ids, _ = take(1, job, VOCAB, 0, 1)[0]
    assert bytes(ids[0].tolist()) in text.read_bytes()


def test_named_architectures_know_every_byte() -> None:
    for name in data.NAMED_ARCHITECTURES:
        assert named_architecture(name).vocab_size >= 256


def test_characters_and_lines_may_straddle_the_pieces_in_which_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.storage._READ_BYTES", 3)
    content = "zwölf €uro\n\nlange Zeile ohne Ende 𝄞" * 3
    path = tmp_path / "text.txt"
    path.write_text(content)
    tokens = data.read_tokens(str(path), lambda piece: list(piece.encode()))
    assert bytes(tokens.tolist()) == content.encode()


def test_a_very_long_line_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.storage._READ_BYTES", 16)
    monkeypatch.setattr(data, "_LONGEST_LINE", 32)
    path = tmp_path / "text.txt"
    path.write_text("x" * 1000)
    pieces: list[int] = []
    data.read_tokens(str(path), lambda piece: pieces.append(len(piece)) or [0] * len(piece))
    assert sum(pieces) == 1000 and max(pieces) <= 48


def test_a_real_tokenizer_is_read_from_the_models_folder(tmp_path: Path, text: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0} | {f"{number:04d}": number + 1 for number in range(200)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path / "model")
    job = config(model_id=str(tmp_path / "model"), data=str(text))
    ids, labels = take(1, job, 201, 0, 1)[0]
    assert torch.equal(labels, ids + 1)
    with pytest.raises(DataError, match=r"rank 0: .*token id 200, but the model knows 100 tokens"):
        data.batches(job, 100, 0, 1)


def test_a_function_of_the_users_own_takes_the_place_of_all_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data.py").write_text("def batches(*args, **kwargs):\n    return iter([args])\n")
    monkeypatch.syspath_prepend(tmp_path)
    job = config(data="python:own_data:batches")
    assert next(data.batches(job, VOCAB, 1, 2, start_batch=7)) == (job, VOCAB, 1, 2, 7)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.txt", b"", "the file is empty"),
        ("latin1.txt", b"caf\xe9 au lait", "not UTF-8 at byte 3"),
        ("cut.txt", b"x" * 500 + b"\xe2\x82", "not UTF-8 at byte 500"),
        ("late.txt", "ä€".encode() * 600_000 + b"\xff", "not UTF-8 at byte 3000000"),
        ("short.txt", b"x" * 32, "32 tokens, but one batch on each of 2 workers takes 33"),
        ("missing.txt", None, "cannot be read: No such file or directory"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".txt") else "",
)
def test_a_bad_file_is_an_error_at_the_call_that_names_rank_and_file(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        data.batches(config(data=str(path)), VOCAB, 1, 2)
    assert str(raised.value).startswith("rank 1: ")
    assert str(path) in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "name", ["python:no_such_module:f", "python:math:nothing", "python:math", "python:math:pi"]
)
def test_a_function_that_does_not_exist_is_an_error_with_the_form_to_use(name: str) -> None:
    with pytest.raises(DataError, match="use python:<module>:<function>"):
        data.batches(config(data=name), VOCAB, 0, 1)


def test_the_smallest_text_that_is_enough_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x" * 33)
    batches = data.batches(config(data=str(path)), VOCAB, 1, 2)
    assert np.shape(next(batches)[0]) == (2, 8)
