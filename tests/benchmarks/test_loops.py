"""The re-created loops do what is said of them: precision, tying, learning."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import ranks
from benchmarks.loops import AWS_SAMPLE, BUILDERS, architecture, shard_as_sample
from benchmarks.loops import _hugging_face_model as hugging_face_model
from benchmarks.plans import Trial
from benchmarks.timing import Timing, measure, spread
from training.shape import TINY

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_loop_starts_at_the_loss_of_guessing_and_learns(one_rank, name):
    losses = []

    def work(place):
        step = BUILDERS[name](place, Trial(name, 2, 16).workload("tiny", "cpu"))
        losses.extend(step() for _ in range(31))

    ranks.run(work, (), ["node0"], "cpu")
    assert losses[0] == pytest.approx(math.log(259), rel=0.05)
    assert losses[30] < losses[0]  # the same batch again, ten rounds later


def test_the_sample_stores_bf16_and_parts_head_from_embedding(one_rank):
    def work(place):
        model = hugging_face_model("tiny", CPU, torch.bfloat16)
        assert sum(p.numel() for p in model.parameters()) == TINY.num_parameters()
        sharded = shard_as_sample(model, "tiny", CPU)
        parameters = list(sharded.parameters())
        assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
        assert sum(p.numel() for p in parameters) == TINY.num_parameters() + TINY.embedding_parameters

    ranks.run(work, (), ["node0"], "cpu")


def test_the_sample_reads_its_loss_on_the_host_after_each_step(one_rank):
    def work(place):
        step = BUILDERS[AWS_SAMPLE](place, Trial(AWS_SAMPLE, 1, 8).workload("tiny", "cpu"))
        assert isinstance(step(), float)

    ranks.run(work, (), ["node0"], "cpu")


def test_the_small_model_has_the_embedding_share_of_the_large_one():
    config = architecture("small")
    embedding = config.vocab_size * config.hidden_size
    assert embedding / 6.9e6 == pytest.approx(151_936 * 1536 / 1.5437e9, rel=0.05)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="medium"):
        architecture("medium")


def test_only_timed_steps_are_counted():
    calls = []
    timing = measure(lambda: calls.append(1) or 0.5, CPU, num_warmup=3, num_steps=4)
    assert len(calls) == 7 and len(timing.step_s) == 4
    assert timing.peak_gib is None and timing.last_loss == 0.5


def test_rounds_add_up_to_one_timing():
    total = Timing([1.0, 2.0], 3.0, 1, 0.1) + Timing([3.0], 4.0, 2, 0.2)
    assert total == Timing([1.0, 2.0, 3.0], 4.0, 3, 0.2)
    assert total.median_s == 2.0


def test_the_spread_is_the_quartiles_distance_over_the_median():
    assert spread([1.0]) == 0.0
    assert spread([2.0] * 5) == 0.0
    assert spread([1, 2, 3, 4, 5, 6, 7]) == pytest.approx((6 - 2) / 4)
