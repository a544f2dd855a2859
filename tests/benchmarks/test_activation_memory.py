"""What a layer keeps is counted on the product's layers; the predictor's steps are those measured."""

from __future__ import annotations

import itertools
import json

import pytest

from benchmarks import activation_memory
from benchmarks.summary import FOLDER
from training.config import activation_budget
from training.cost_model import BUDGET_STEPS, budget_step

MEASURED = json.loads((FOLDER / "results" / "activation_memory.json").read_text())["rows"]


def test_the_less_is_kept_the_more_is_computed_again(tmp_path, monkeypatch):
    monkeypatch.setattr(activation_memory, "SETTINGS", ["none", "0.5", "full"])
    out = tmp_path / "kept.json"
    assert activation_memory.main(["--model", "tiny", "--seq-len", "64", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    everything, half, least = content["rows"]
    assert content["complete"]
    assert everything["bytes_per_token"] > half["bytes_per_token"] > least["bytes_per_token"]
    # The layer's input in bf16, and the state of the CPU's random numbers, 5 kB for all tokens.
    assert 2 * 64 <= least["bytes_per_token"] <= 2 * 64 + 6000 / 64
    assert everything["backward_mflops_per_token"] < least["backward_mflops_per_token"]
    assert (everything["kept_share"], least["kept_share"]) == (1, 0)
    assert out.with_suffix(".png").exists()


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: row["activation_memory"])
def test_the_predictor_s_steps_are_those_that_were_measured(row):
    step = budget_step(activation_budget(row["activation_memory"]))
    assert step.kept_share == pytest.approx(row["kept_share"], abs=0.001)
    assert step.recomputed_share == pytest.approx(row["recomputed_share"], abs=0.001)


def test_between_measured_budgets_the_predictor_expects_the_larger_memory():
    budgets = [step.highest_budget for step in BUDGET_STEPS]
    assert budgets == sorted(budgets) and (budgets[0], budgets[-1]) == (0, 1)
    for lower, upper in itertools.pairwise(BUDGET_STEPS):
        assert budget_step((lower.highest_budget + upper.highest_budget) / 2) == upper
        assert lower.kept_share < upper.kept_share
        assert lower.recomputed_share >= upper.recomputed_share
