"""Every benchmark explains itself."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import (
    activation_memory,
    boundary_bytes,
    cli,
    l4_memory,
    load,
    quality,
    summary,
    throughput,
    two_nodes_of_four,
)

PROGRAMS = (activation_memory, boundary_bytes, l4_memory, load, quality, throughput, two_nodes_of_four)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_benchmark_has_help_that_names_its_command_and_explains_each_argument(program, capsys):
    with pytest.raises(SystemExit) as exit_:
        program.main(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"python -m {program.__name__}" in text and "--out FILE" in text
    assert "default: None" not in text


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_every_benchmark_is_described_in_the_document(program):
    assert f"`{program.__name__.removeprefix('benchmarks.')}.py`" in summary.README.read_text()


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_counts_must_be_whole_and_above_zero(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number above 0"):
        cli.positive(text)
