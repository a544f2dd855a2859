"""The job's command line: what k8s/ renders is what training.run reads."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import TrainingConfig, UsageError, flag, from_argv, to_argv

_TEXT = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=30)


@st.composite
def configs(draw) -> TrainingConfig:
    """Any configuration that is valid."""
    values = {
        "model_id": draw(_TEXT.filter(bool)),
        "data": draw(_TEXT),
        "steps": draw(st.integers(1, 10**6)),
        "learning_rate": draw(st.floats(1e-9, 1.0)),
        "activation_memory": draw(st.sampled_from(["none", "full", "0.25"])),
        "reshard_after_forward": draw(st.booleans()),
        "require_gpudirect": draw(st.booleans()),
        "sharding": draw(st.sampled_from(["hybrid", "full"])),
        "storage_path": draw(st.just("s3://bucket/run s") | _TEXT.filter(bool)),
        "num_workers": draw(st.integers(0, 64)),
    }
    return TrainingConfig(**values)


@given(configs())
def test_a_configuration_survives_the_command_line(config):
    assert from_argv(to_argv(config)) == config


def test_every_field_has_a_flag_of_its_own_name_and_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        from_argv(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(TrainingConfig):
        assert flag(field.name) in text
        assert field.metadata["help"]


def test_model_is_accepted_for_model_id():
    assert from_argv(["--model", "tiny"]).model_id == "tiny"


def problems(*argv: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        from_argv(list(argv))
    return caught.value.problems


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--steps", "x"], "--steps x: not a whole number"),
        (["--learning-rate", "fast"], "--learning-rate fast: not a number"),
        (["--steps"], "--steps: expected one argument"),
        (["--stepz", "3"], "--stepz: no such argument; did you mean --steps?"),
        (["tiny"], "tiny: no such argument"),
        (["--seq-len", "0"], "--seq-len 0: must be at least 1"),
        (["--num-workers", "-1"], "--num-workers -1: must not be negative"),
        (["--learning-rate", "nan"], "--learning-rate nan: must be a number above 0"),
        (["--weight-decay", "-0.1"], "--weight-decay -0.1: must be a number, 0 or more"),
        (["--sharding", "zero3"], "--sharding zero3: use one of hybrid, full"),
        (["--activation-memory", "lots"], "--activation-memory lots: use none, full"),
        (["--collective-timeout-s", "1000"], "--collective-timeout-s 1000: must be from 1 to 600"),
        (["--model-id", ""], "--model-id '': name a model"),
        (["--run-name", "../x"], "--run-name ../x: use letters"),
        (["--device", "cpu"], "--num-workers 0: --device cpu needs a number of workers"),
        (["--num-workers", "8", "--global-batch-size", "30"], "--global-batch-size 30: does not divide"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value_and_a_remedy(argv, line):
    assert any(line in problem for problem in problems(*argv)), problems(*argv)


def test_all_problems_are_reported_at_once():
    assert len(problems("--steps", "x", "--seq-len", "0", "--nonsense", "--sharding", "y")) == 4


@pytest.mark.parametrize(
    ("global_batch", "world_size", "micro_batches"), [(0, 8, 8), (32, 8, 1), (64, 8, 2), (64, 2, 8)]
)
def test_a_global_batch_size_decides_the_number_of_micro_batches(global_batch, world_size, micro_batches):
    config = TrainingConfig(batch_size=4, global_batch_size=global_batch, gradient_accumulation=8)
    assert config.num_micro_batches(world_size) == micro_batches


def test_the_configuration_needs_no_installed_package():
    """cdk synth imports it where neither torch nor Ray is installed."""
    code = (
        "import training.config, sys; print(sorted(m for m in ('torch', 'ray', 'numpy') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
