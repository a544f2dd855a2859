"""The job's configuration: one definition for both sides of the command line.

`k8s/` renders a `TrainingConfig` into the RayJob's entrypoint with `to_argv`; `training.run` reads the
same flags back with `from_argv`. A field `seq_len` is the flag `--seq-len` and the CDK setting `seq_len`:
one name everywhere. This module imports neither torch nor Ray, so that `cdk synth` needs neither.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_COLLECTIVE_TIMEOUT_S = 600

# NCCL_DEBUG* and NCCL_NET* are the transport check's own: else it may read nothing, or another network.
_NCCL_VARIABLE = r"NCCL_(?!DEBUG|NET(?:_PLUGIN)?=)[A-Z0-9_]+=[^,\s]+"
_NCCL_VARIABLES = re.compile(rf"({_NCCL_VARIABLE}(,{_NCCL_VARIABLE})*)?")


class UsageError(ValueError):
    """The command line cannot be used.

    Attributes:
        problems: one sentence for each thing that is wrong; each names flag, value and remedy.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def _setting(default: Any, help: str, choices: Sequence[str] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "choices": tuple(choices)})


@dataclass(frozen=True)
class TrainingConfig:
    """Everything one training run needs to know. Field order is the order of `--help`."""

    # What is trained, on what
    model_id: str = _setting(
        "Qwen/Qwen2.5-1.5B",
        "Hugging Face model id, a local folder, or an architecture with random weights: "
        "'tiny' (Qwen2, 0.3 M parameters) or 'qwen2.5-1.5b-random'",
    )
    # The commit of Qwen/Qwen2.5-1.5B that holds the published weights; a branch name would move.
    model_revision: str = _setting(
        "8faed761d45a263340a0528343f099c05c9a4323", "commit of the model on the hub; ignored for folders"
    )
    data: str = _setting(
        "", "UTF-8 text file to train on, or python:<module>:<function> (data.py); empty: random token ids"
    )

    # How long, how much at once
    steps: int = _setting(20, "optimizer steps")
    batch_size: int = _setting(4, "sequences per worker and micro-batch")
    seq_len: int = _setting(2048, "tokens per sequence")
    gradient_accumulation: int = _setting(8, "micro-batches per optimizer step")
    global_batch_size: int = _setting(
        0,
        "sequences per optimizer step over all workers, which then decides the number of micro-batches; "
        "0: batch size x workers x gradient accumulation",
    )
    seed: int = _setting(0, "seed of weights (random architectures), data order and random tokens")

    # Optimizer
    learning_rate: float = _setting(2e-5, "peak learning rate of AdamW")
    warmup_steps: int = _setting(2, "steps of linear warm-up, then cosine decay to 10% of the peak")
    weight_decay: float = _setting(0.1, "AdamW weight decay (not on norms and biases)")
    max_grad_norm: float = _setting(1.0, "clip the global gradient norm to this; 0: do not clip")
    on_nan: str = _setting(
        "stop", "when a loss is not finite: stop, or skip the step and count it", ("stop", "skip")
    )

    # How it is spread and stored
    num_workers: int = _setting(0, "workers (ranks); 0: one for each GPU of the Ray cluster")
    device: str = _setting("cuda", "device of the workers", ("cuda", "cpu"))
    sharding: str = _setting(
        "hybrid",
        "hybrid: shard inside a node, replicate across nodes; full: shard over all workers",
        ("hybrid", "full"),
    )
    on_uneven_placement: str = _setting(
        "fail",
        "when nodes hold unequal numbers of workers, hybrid sharding cannot be built",
        ("fail", "full"),
    )
    layers_per_unit: int = _setting(1, "decoder layers gathered together; more suits tiny batches")
    reshard_after_forward: bool = _setting(False, "free gathered weights between forward and backward")
    reduce_dtype: str = _setting(
        "float32", "type in which gradients are summed across workers", ("float32", "bfloat16")
    )
    activation_memory: str = _setting(
        "0.3", "none: keep all activations; full: recompute each layer; 0 < x < 1: compiler's budget"
    )
    compile: str = _setting("auto", "torch.compile each layer; auto: on CUDA only", ("auto", "on", "off"))

    # Proof of the network
    require_transport: str = _setting(
        "any",
        "network that NCCL must be seen to use between nodes, or the job fails",
        ("efa", "socket", "any"),
    )
    require_gpudirect: bool = _setting(False, "with efa: every channel between nodes must use GPUDirect RDMA")
    instance_type: str = _setting(
        "", "EC2 type of the GPU nodes: line rate and memory for reports and predictions"
    )
    nccl_variables: str = _setting(
        "", "more NCCL variables for every worker, NAME=VALUE separated by commas; not those of this check"
    )
    nccl_log_dir: str = _setting(
        "",
        "folder for one NCCL log per rank; empty: /tmp/nccl/<run name>. With --device cpu and a required "
        "network, the logs that lie there are judged, and the run fails all the same: a rehearsal",
    )
    collective_timeout_s: int = _setting(
        600, f"a hanging collective fails after this, at most {MAX_COLLECTIVE_TIMEOUT_S}"
    )

    # Where results go
    storage_path: str = _setting("/tmp/ray-train", "folder or s3:// prefix for step records and the summary")
    run_name: str = _setting("", "name of this run under the storage path; empty: date and time")
    max_run_s: int = _setting(0, "end the run, as failed, once it has taken this long; 0: no limit")
    untimed_steps: int = _setting(3, "first steps left out of throughput figures (compilation, allocation)")

    def __post_init__(self) -> None:
        if problems := [str(problem) for problem in find_problems(dataclasses.asdict(self))]:
            raise UsageError(problems)
        if self.num_workers:
            self.num_micro_batches(self.num_workers)

    def num_micro_batches(self, world_size: int) -> int:
        """Micro-batches each worker runs per optimizer step.

        Args:
            world_size: number of workers.

        Raises:
            UsageError: `global_batch_size` is not a multiple of `batch_size` x `world_size`.
        """
        if not self.global_batch_size:
            return self.gradient_accumulation
        per_round = self.batch_size * world_size
        if self.global_batch_size % per_round:
            lower = self.global_batch_size // per_round * per_round
            nearest = " or ".join(str(size) for size in (lower, lower + per_round) if size)
            problem = (
                f"--global-batch-size {self.global_batch_size}: does not divide into {world_size} workers "
                f"x --batch-size {self.batch_size} = {per_round} sequences a round; use {nearest}"
            )
            raise UsageError([problem])
        return self.global_batch_size // per_round


def flag(field_name: str) -> str:
    """The command-line flag of a field: `seq_len` -> `--seq-len`."""
    return "--" + field_name.replace("_", "-")


def to_argv(config: TrainingConfig) -> list[str]:
    """The command line that gives exactly `config`; values that equal the default are left out."""
    argv: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if isinstance(field.default, bool):
            argv.append(flag(field.name) if value else flag("no_" + field.name))
        else:
            text = str(value)  # argparse takes a lone "-x" for a flag
            argv += [f"{flag(field.name)}={text}"] if text.startswith("-") else [flag(field.name), text]
    return argv


def from_argv(argv: Sequence[str], prog: str = "python -m training.run") -> TrainingConfig:
    """Reads a command line.

    Args:
        argv: the arguments, without the program's name.
        prog: what `--help` calls the program.

    Raises:
        UsageError: with every problem found, not only the first.
        SystemExit: after `--help`.
    """
    parser = _parser(prog)
    namespace, unknown = parser.parse_known_args(list(argv))
    problems = parser.problems + [_unknown(word) for word in unknown if not _is_value(word, unknown)]
    # Python 3.11's argparse drops a value that is exactly "--" and leaves an empty list.
    values = {key: "--" if value == [] else value for key, value in vars(namespace).items()}
    try:
        config = TrainingConfig(**values)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    return config


def _is_value(word: str, unknown: list[str]) -> bool:
    """Whether `word` is the value of an unknown flag: that flag alone is worth a line."""
    before = unknown.index(word) - 1
    return not word.startswith("--") and before >= 0 and unknown[before].startswith("--")


def _unknown(word: str) -> str:
    flags = [flag(field.name) for field in dataclasses.fields(TrainingConfig)]
    near = difflib.get_close_matches(word, flags, n=1)
    return f"{word}: no such argument; " + (f"did you mean {near[0]}?" if near else "--help lists them")


class _Parser(argparse.ArgumentParser):
    """Collects problems where argparse would exit at the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.problems: list[str] = []

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse declares NoReturn
        raise UsageError([*self.problems, message])


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where the default is the empty string."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default == "" else super()._get_help_string(action)


def _parser(prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        description="Fine-tunes a causal language model with Ray Train and FSDP2, "
        "and fails unless NCCL is seen to use the required network.",
    )
    for field in dataclasses.fields(TrainingConfig):
        _add_field(parser, field)
    return parser


def _add_field(parser: _Parser, field: dataclasses.Field) -> None:
    help_text = field.metadata["help"].replace("%", "%%")
    # `--model` is what people type first; the setting's own name stays the one in rendered manifests.
    names = [flag(field.name), "--model"] if field.name == "model_id" else [flag(field.name)]
    if isinstance(field.default, bool):
        parser.add_argument(
            *names, action=argparse.BooleanOptionalAction, default=field.default, help=help_text
        )
        return
    choices = field.metadata["choices"]
    parser.add_argument(
        *names,
        default=field.default,
        metavar="|".join(choices) or type(field.default).__name__.upper(),
        type=_reader(parser, field),
        help=help_text,
    )


def _reader(parser: _Parser, field: dataclasses.Field) -> Any:
    """A `type=` for argparse that notes a problem and goes on with the default."""
    kind = type(field.default)

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            parser.problems.append(f"{flag(field.name)} {text}: not {wanted}")
            return field.default

    return read


@dataclass(frozen=True)
class Problem:
    """A value that cannot work: which field, what it holds, what would be right."""

    field: str
    value: Any
    remedy: str

    def __str__(self) -> str:
        shown = self.value if self.value != "" else "''"
        return f"{flag(self.field)} {shown}: {self.remedy}"


def find_problems(values: Mapping[str, Any]) -> list[Problem]:
    """Checks values of `TrainingConfig` fields; fields that are missing in `values` are not checked.

    Args:
        values: field name -> value of the field's own type.
    """
    found: list[Problem] = []

    def check(name: str, is_right: Callable[[Any], bool], remedy: str) -> None:
        if name in values and not is_right(values[name]):
            found.append(Problem(name, values[name], remedy))

    for field in dataclasses.fields(TrainingConfig):
        if choices := field.metadata["choices"]:
            check(field.name, choices.__contains__, f"use one of {', '.join(choices)}")
    for name in ("steps", "batch_size", "seq_len", "gradient_accumulation", "layers_per_unit"):
        check(name, lambda number: number >= 1, "must be at least 1")
    for name in ("num_workers", "warmup_steps", "untimed_steps", "max_run_s", "seed", "global_batch_size"):
        check(name, lambda number: number >= 0, "must not be negative")
    for name in ("weight_decay", "max_grad_norm"):
        check(name, lambda number: math.isfinite(number) and number >= 0, "must be a number, 0 or more")
    check("learning_rate", lambda rate: math.isfinite(rate) and rate > 0, "must be a number above 0")
    check(
        "collective_timeout_s",
        lambda seconds: 1 <= seconds <= MAX_COLLECTIVE_TIMEOUT_S,
        f"must be from 1 to {MAX_COLLECTIVE_TIMEOUT_S}",
    )
    check("model_id", bool, "name a model, a folder, or 'tiny'")
    check("storage_path", bool, "name a folder or an s3:// prefix")
    check(
        "run_name",
        re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)?").fullmatch,
        "use letters, digits, '.', '_', '-' only",
    )
    check(
        "activation_memory",
        lambda text: activation_budget(text) is not None,
        "use none, full, or a number between 0 and 1 such as 0.5",
    )
    check(
        "nccl_variables",
        _NCCL_VARIABLES.fullmatch,
        "use NCCL_NAME=value,...; the transport check sets NCCL_DEBUG* and NCCL_NET* itself",
    )
    if values.get("device") == "cpu":
        check(
            "num_workers", lambda number: number != 0, "--device cpu needs a number of workers, for example 2"
        )
        if not values.get("nccl_log_dir"):  # with it, logs are judged and the run fails: training.handshake
            check("require_transport", "any".__eq__, "--device cpu uses gloo, never NCCL; use any")
    return found


def activation_budget(activation_memory: str) -> float | None:
    """The compiler's activation budget: 1.0 keeps all, 0.0 recomputes all; None if it cannot be read."""
    if activation_memory in ("none", "full"):
        return 1.0 if activation_memory == "none" else 0.0
    try:
        budget = float(activation_memory)
    except ValueError:
        return None
    return budget if 0 < budget < 1 else None
