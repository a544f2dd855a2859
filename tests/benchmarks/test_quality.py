"""Precision against training, run whole on a tiny model."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import quality
from benchmarks.markov import MarkovLanguage, entropy

CPU = torch.device("cpu")


def test_all_arms_train_from_one_start_and_only_bf16_leaves_weights_where_they_were(one_rank, tmp_path):
    out = tmp_path / "quality.json"
    assert quality.main(["--device", "cpu", "--model", "tiny", "--quick", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert content["complete"] and set(rows) == set(quality.DESCRIPTIONS)
    first_losses = [row["first_loss"] for row in rows.values()]
    assert max(first_losses) - min(first_losses) < 0.01
    assert rows["bf16-pure"]["moved_share"] < 0.6
    for name in ("fp32-masters", "ours"):
        assert rows[name]["moved_share"] > 0.99
        assert rows[name]["eval_loss"] < rows["bf16-pure"]["eval_loss"] < content["start_eval_loss"]
    assert out.with_suffix(".png").stat().st_size > 0


def test_every_token_has_four_successors_and_half_of_them_change():
    language = MarkovLanguage(vocab_size=50, num_states=20, seed=1, device=CPU)
    before = language._successors.clone()
    language.change_half(seed=2)
    assert torch.equal(language._successors[1::2], before[1::2])
    assert not torch.equal(language._successors[::2], before[::2])
    ((input_ids, labels),) = language.batches(1, batch_size=8, seq_len=40, seed=3)
    assert torch.equal(input_ids[:, 1:], labels[:, :-1])
    for token in input_ids.unique():
        assert len(labels[input_ids == token].unique()) <= 4


def test_batches_depend_on_their_seed_alone():
    def batch(seed):
        return MarkovLanguage(50, 20, 1, CPU).batches(1, 2, 8, seed)[0][0]

    assert torch.equal(batch(3), batch(3)) and not torch.equal(batch(3), batch(4))


def test_the_lowest_loss_is_the_entropy_of_the_successors():
    assert entropy() == pytest.approx(1.208, abs=0.001)


def test_weights_count_as_moved_when_their_stored_value_changed():
    start = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(1, dtype=torch.bfloat16)}
    end = {"a": torch.tensor([1.0, 1.0 + 1e-4, 2.0]), "b": torch.zeros(1)}
    assert quality._moved_share(start, end) == 0.5
    assert quality._moved_share(start, {name: tensor.bfloat16() for name, tensor in end.items()}) == 0.25


def test_a_gpu_that_is_not_there_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        quality.main(["--out", str(tmp_path / "x.json")])
    assert exit_.value.code == 2 and "--device cuda: no GPU here" in capsys.readouterr().err
