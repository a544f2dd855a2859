"""Loading measured: memory that is watched is memory that is there."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import load
from benchmarks.processes import PeakMemory, host_memory
from training.shape import TINY


def test_both_ways_to_load_are_measured(one_rank, tmp_path):
    out = tmp_path / "load.json"
    assert load.main(["--model", "tiny", "--num-ranks", "1", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert content["complete"] and set(rows) == set(load.DESCRIPTIONS)
    shards_bytes = rows["ours"]["shards_gib"] * 2**30
    assert shards_bytes == pytest.approx(4 * TINY.num_parameters()), "fp32 shards, each weight once"
    untied = TINY.num_parameters() + TINY.embedding_parameters
    assert rows["from-pretrained"]["shards_gib"] * 2**30 == pytest.approx(2 * untied), "bf16, head parted"
    assert all(row["seconds"] > 0 for row in rows.values())


def test_the_written_model_is_one_that_can_be_loaded(tmp_path):
    num_gib = load.write_model("tiny", str(tmp_path))
    assert num_gib * 2**30 == pytest.approx(2 * TINY.num_parameters(), rel=0.05)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_memory_that_was_held_and_given_back_is_in_the_peak():
    with PeakMemory([os.getpid()]) as memory:
        held = bytearray(64 << 20)
        held[::4096] = b"x" * len(held[::4096])
        memory._look()
        del held
    assert memory.peak.total_gib - memory.start.total_gib > 0.05
    assert memory.peak_unreclaimable_gib >= memory.peak.anonymous_gib > 0


def test_a_process_that_has_ended_holds_nothing():
    assert host_memory([2**22 + 1]).total_gib == 0


def test_more_ranks_than_gpus_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        load.main(["--device", "cuda", "--out", str(tmp_path / "x.json")])
    assert exit_.value.code == 2 and "--num-ranks 4: 0 GPUs here" in capsys.readouterr().err
