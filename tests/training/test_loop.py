"""The whole job on several ranks: what it reports, and that it ends everywhere with one reason."""

import json
import math
import re
import traceback
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.engine import configured, micro_batches, parameters, tiny_model
from tests.training.ranks import reporting_to, run_ranks
from training import loop
from training.config import UsageError
from training.errors import DataError, JobError, NotFiniteError
from training.shape import QWEN25_1_5B
from training.step import train_step

HERE = "python:tests.training.test_loop"
TWO_BY_TWO = ["a", "a", "b", "b"]
MEASURED = (
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "steps_per_s",
    "step_s_p50",
    "step_s_p95",
    "data_wait_s_mean",
)


def _run(worker, config):
    """Summary and records of one rank, or the kind and text of its error."""
    records = []
    try:
        return loop.train(config, reporting_to(worker, records)), records
    except (JobError, UsageError) as error:
        return type(error), str(error), records, traceback.format_exc()


def _failures(config, num_ranks=2, nodes=None):
    outcomes = run_ranks(_run, num_ranks, config, nodes=nodes)
    assert all(isinstance(outcome[0], type) for outcome in outcomes), outcomes
    return outcomes


# --- a run that succeeds --------------------------------------------------------------------


@pytest.fixture(scope="module")
def succeeded(tmp_path_factory):
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    config = configured(
        data=str(text), seq_len=32, steps=8, gradient_accumulation=2, learning_rate=2e-2, untimed_steps=2
    )
    return run_ranks(_run, 4, config, nodes=TWO_BY_TWO)


def test_every_rank_reports_the_same_steps(succeeded):
    losses = [[record["loss"] for record in records] for _, records in succeeded]
    assert all(len(of_rank) == 8 and of_rank == losses[0] for of_rank in losses)
    assert [record["step"] for record in succeeded[0][1]] == list(range(1, 9))


def test_the_loss_falls_on_text_that_repeats(succeeded):
    summary, records = succeeded[0]
    assert summary["first_loss"] == records[0]["loss"] == pytest.approx(math.log(259), rel=0.02)
    assert summary["last_loss"] == records[-1]["loss"] < 0.7 * summary["first_loss"]


def test_records_and_summary_are_strict_json(succeeded):
    for summary, records in succeeded:
        json.dumps([summary, records], allow_nan=False)


def test_the_summary_says_what_ran_and_where(succeeded):
    summary = succeeded[0][0]
    expected = {
        "model_id": "tiny",
        "num_parameters": 263_424,
        "world_size": 4,
        "num_ranks_per_node": {"a": 2, "b": 2},
        "mesh": {"replicate": 2, "shard": 2},
        "device_name": "cpu",
        "compiled": False,
        "num_steps": 8,
        "num_skipped_steps": 0,
        "num_timed_steps": 6,
        "tokens_per_step": 2 * 32 * 2 * 4,
        "mfu": None,
    }
    assert {name: summary[name] for name in expected} == expected
    assert all(summary[name] > 0 for name in MEASURED)
    assert summary["transport"]["verdict"] == summary["transport"]["confirmed"]["verdict"] == "not applicable"


def test_the_summary_is_the_same_on_every_rank_but_for_its_clock(succeeded):
    def without_clock(summary):
        return {name: value for name, value in summary.items() if name not in MEASURED}

    assert all(without_clock(summary) == without_clock(succeeded[0][0]) for summary, _ in succeeded)


# --- data that fails on one rank ------------------------------------------------------------


def _endless(config, vocab_size):
    while True:
        yield from micro_batches(1, config.batch_size, config.seq_len, vocab_size=vocab_size)


def raises_on_rank_1(config, vocab_size, rank, world_size, start_batch=0):
    batches = _endless(config, vocab_size)
    for _ in range(3):
        yield next(batches)
    if rank == 1:
        raise OSError("shard-00001.parquet: connection reset")
    yield from batches


def ends_on_rank_1(config, vocab_size, rank, world_size, start_batch=0):
    batches = _endless(config, vocab_size)
    return batches if rank != 1 else (next(batches) for _ in range(3))


def unknown_token_on_rank_1(config, vocab_size, rank, world_size, start_batch=0):
    for index, (ids, labels) in enumerate(_endless(config, vocab_size)):
        if rank == 1 and index == 3:
            labels[0, 0] = vocab_size
        yield ids, labels


def too_short_on_rank_1(config, vocab_size, rank, world_size, start_batch=0):
    for index, (ids, labels) in enumerate(_endless(config, vocab_size)):
        yield (ids[:, 1:], labels[:, 1:]) if rank == 1 and index == 3 else (ids, labels)


def cannot_be_opened_on_rank_1(config, vocab_size, rank, world_size, start_batch=0):
    if rank == 1:
        raise DataError("tokens.bin: no such file")
    return _endless(config, vocab_size)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises_on_rank_1, "shard-00001.parquet: connection reset"),
        (ends_on_rank_1, "the data ended; an iterator of batches must be endless"),
        (unknown_token_on_rank_1, "label id 259 is outside of the model's 259 tokens"),
        (too_short_on_rank_1, r"input ids are torch.int64 \[2, 15\].*ask for torch.int64 \[2, 16\]"),
    ],
)
def test_bad_data_on_one_rank_ends_the_job_on_all_with_its_reason(function, reason):
    config = configured(data=f"{HERE}:{function.__name__}", steps=5, gradient_accumulation=2)
    for kind, text, records, _ in _failures(config):
        assert kind is DataError
        assert re.fullmatch(f"rank 1: its data failed in step 2: {reason}", text)
        assert [record["step"] for record in records] == [1]


def test_data_that_one_rank_cannot_open_ends_the_job_on_all():
    config = configured(data=f"{HERE}:{cannot_be_opened_on_rank_1.__name__}", steps=5)
    for kind, text, records, _ in _failures(config):
        assert (kind, text, records) == (DataError, "rank 1: tokens.bin: no such file", [])


# --- numbers that are not finite ------------------------------------------------------------

NAN_TOKEN = 130


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model with one embedding that is NaN: a batch that has this token has no finite loss."""
    folder = tmp_path_factory.mktemp("poisoned")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    hf = LlamaForCausalLM(LlamaConfig(vocab_size=NAN_TOKEN + 1, **sizes, tie_word_embeddings=False))
    with torch.no_grad():
        hf.model.embed_tokens.weight[NAN_TOKEN] = math.nan
    hf.save_pretrained(folder)
    return str(folder)


def nan_token_on_rank_1_in_step_2(config, vocab_size, rank, world_size, start_batch=0):
    for index, (ids, labels) in enumerate(_endless(config, NAN_TOKEN)):
        if rank == 1 and index == 1:
            ids[0, 0] = NAN_TOKEN
        yield ids, labels


def _poisoned_run(poisoned, **changes):
    data = f"{HERE}:{nan_token_on_rank_1_in_step_2.__name__}"
    return configured(model_id=poisoned, data=data, steps=4, **changes)


def test_a_loss_that_is_not_finite_stops_every_rank_and_names_step_and_rank(poisoned):
    for kind, text, records, _ in _failures(_poisoned_run(poisoned)):
        assert kind is NotFiniteError
        assert text.startswith("step 2: the loss is not finite on rank 1 (loss nan, gradient norm nan)")
        assert "--learning-rate" in text and "--on-nan skip" in text
        assert [record["step"] for record in records] == [1]


def test_a_step_that_is_skipped_is_counted_and_the_run_goes_on(poisoned):
    for summary, records in run_ranks(_run, 2, _poisoned_run(poisoned, on_nan="skip")):
        assert summary["num_skipped_steps"] == 1
        assert [record["skipped"] for record in records] == [False, True, False, False]
        assert [record["loss"] is None for record in records] == [False, True, False, False]
        assert summary["last_loss"] == records[-1]["loss"]


def only_nan_tokens(config, vocab_size, rank, world_size, start_batch=0):
    for ids, labels in _endless(config, NAN_TOKEN):
        yield ids.fill_(NAN_TOKEN), labels


def test_a_run_that_skips_every_step_has_failed(poisoned):
    config = configured(model_id=poisoned, data=f"{HERE}:{only_nan_tokens.__name__}", steps=3, on_nan="skip")
    for kind, text, _, _ in _failures(config):
        assert kind is NotFiniteError
        assert text.startswith("all 3 steps were skipped")


def _one_bad_step(worker, nodes):
    """Three steps, of which rank 1 computes a NaN in the second; parameters after each."""
    config = configured(on_nan="skip")
    model = tiny_model(worker, nodes, config)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    results, after = [], [parameters(model)]
    for step in (1, 2, 3):
        hook = None
        if step == 2 and worker.rank == 1:
            hook = model.last_norm.register_forward_hook(lambda module, inputs, output: output * math.nan)
        results.append(train_step(model, sgd, micro_batches(2, seed=step), config).read())
        after.append(parameters(model))
        if hook:
            hook.remove()
    moved = [any(not torch.equal(old[name], new[name]) for name in old) for old, new in pairwise(after)]
    return moved, [result.not_finite_ranks for result in results], after[-1]


def test_one_rank_s_nan_skips_the_step_on_every_rank():
    outcomes = run_ranks(_one_bad_step, 2, ["a", "a"])
    for moved, not_finite_ranks, last in outcomes:
        assert moved == [True, False, True]
        assert not_finite_ranks == [[], [1], []]
        assert all(tensor.isfinite().all() for tensor in last.values())


# --- what is refused ------------------------------------------------------------------------


def test_a_sequence_longer_than_the_context_is_a_usage_error_on_every_rank():
    for kind, text, records, _ in _failures(configured(seq_len=5000)):
        assert (kind, records) == (UsageError, [])
        assert "--seq-len 5000: tiny was built for at most 4096 tokens" in text


def test_an_uneven_placement_is_refused_on_every_rank():
    for kind, text, _, _ in _failures(configured(), num_ranks=3, nodes=["a", "b", "b"]):
        assert kind is JobError
        assert "1 on a, 2 on b" in text


def test_a_folder_without_weights_is_refused_on_every_rank(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for kind, text, _, _ in _failures(configured(model_id=str(tmp_path))):
        assert kind is JobError
        assert f"{tmp_path}: no weights" in text


def test_a_global_batch_that_does_not_divide_is_a_usage_error():
    for kind, text, _, _ in _failures(configured(num_workers=1, global_batch_size=10)):
        assert kind is UsageError
        assert "--global-batch-size 10" in text


def test_a_job_that_will_not_fit_is_warned_of_with_the_setting_to_change(monkeypatch, caplog):
    worker = SimpleNamespace(device=torch.device("cuda"), rank=0)
    mesh = SimpleNamespace(ndim=2, shape=(2, 4))
    config = configured(batch_size=8, seq_len=2048, activation_memory="none")
    warned = {}
    for total_gib in (22, 140):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, total=total_gib: (0, total * 2**30))
        warned[total_gib] = loop._memory_warnings(config, worker, mesh, QWEN25_1_5B)
    assert warned[140] == []
    assert "--batch-size 8 --seq-len 2048: predicted to need" in warned[22][0]
    assert "use --activation-memory 0.25" in warned[22][0]
    assert caplog.messages == warned[22]
