"""Two asynchronous checkpoints of a training run: each is reported as soon as it is complete."""

from __future__ import annotations

import json

import pytest

from benchmarks import checkpoint_stall
from training.model import named_architecture
from training.shape import ModelShape


def test_both_saves_hold_weights_and_moments_and_are_reported(one_rank, tmp_path, capsys):
    out = tmp_path / "stall.json"
    argv = ["--device", "cpu", "--model", "tiny", "--num-ranks", "1"]
    assert checkpoint_stall.main(["--out", str(out), *argv]) == 0
    content = json.loads(out.read_text())
    assert content["complete"] and [row["save"] for row in content["rows"]] == [1, 2]
    num_parameters = ModelShape.from_hf_config(named_architecture("tiny")).num_parameters()
    for row in content["rows"]:
        assert 0 < row["blocked_s"] < row["write_s"]
        weights_and_moments_gb = 12 * num_parameters / 1e9  # all fp32
        assert weights_and_moments_gb < row["size_gb"] < weights_and_moments_gb + 0.001
    assert "save 2: training waited" in capsys.readouterr().out


def test_without_a_gpu_the_way_to_try_it_is_said(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        checkpoint_stall.main(["--out", str(tmp_path / "stall.json")])
    assert ended.value.code == 2
    assert "use --device cpu --model tiny" in capsys.readouterr().err
