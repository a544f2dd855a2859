"""Reads the CDK context into `Settings`, or says everything that is wrong with it."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from settings.checks import cross_check
from settings.model import (
    ClusterSettings,
    NetworkSettings,
    NodesSettings,
    PlatformSettings,
    Prefix,
    RaySettings,
    Settings,
)
from training.config import Problem, TrainingConfig, find_problems

# Fields of the job that the app decides itself: they are not settings.
_DERIVED_TRAINING_FIELDS = {
    "storage_path",
    "run_name",
    "device",
    "instance_type",
    "nccl_log_dir",
    "max_run_s",
}


class SettingsError(ValueError):
    """The context cannot be used.

    Attributes:
        problems: one sentence for each thing that is wrong.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


_SLICES = {
    "network": NetworkSettings,
    "cluster": ClusterSettings,
    "nodes": NodesSettings,
    "platform": PlatformSettings,
    "ray": RaySettings,
    "job": TrainingConfig,
}


def _field_types(of: type) -> dict[str, Any]:
    hints = typing.get_type_hints(of, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(of)}


def setting_types() -> dict[str, Any]:
    """Name -> type of every setting, in the order of the slices."""
    types: dict[str, Any] = {"prefix": Prefix}
    for slice_type in _SLICES.values():
        types |= {
            name: kind
            for name, kind in _field_types(slice_type).items()
            if name not in _DERIVED_TRAINING_FIELDS
        }
    return types


def load(context: Mapping[str, Any]) -> Settings:
    """Reads the settings out of a CDK context.

    Args:
        context: cdk.json's context with the command line's overrides. Keys with ':' or '/' are the CDK's own.

    Raises:
        SettingsError: with every problem found.
    """
    given = {key: value for key, value in context.items() if not re.search(r"[:/]", key)}
    types = setting_types()
    problems = _unknown_keys(given, types) + _missing_keys(given, types)
    values: dict[str, Any] = {}
    for name, kind in types.items():
        if name in given:
            try:
                values[name] = TypeAdapter(kind).validate_python(given[name])
            except ValidationError as error:
                problems.append(_line(name, given[name], _first_reason(error)))
    problems += [_problem_line(found) for found in (*find_problems(values), *cross_check(values))]
    if problems:
        raise SettingsError(problems)
    return _assemble(values)


def _assemble(values: dict[str, Any]) -> Settings:
    slices = {}
    for slice_name, slice_type in _SLICES.items():
        names = _field_types(slice_type).keys() - _DERIVED_TRAINING_FIELDS
        derived = _derived_training_fields(values) if slice_type is TrainingConfig else {}
        slices[slice_name] = slice_type(**{name: values[name] for name in names}, **derived)
    # Said out loud on the command line: a job that starts before all nodes are there waits for them.
    job = slices["job"]
    slices["job"] = dataclasses.replace(job, num_workers=job.num_workers or slices["nodes"].num_gpus)
    return Settings(prefix=values["prefix"], **slices)


def _derived_training_fields(values: dict[str, Any]) -> dict[str, Any]:
    return {"instance_type": values["gpu_instance_type"], "max_run_s": values["job_deadline_s"]}


def _problem_line(problem: Problem) -> str:
    return _line(problem.field, problem.value, problem.remedy)


def _line(name: str, value: Any, remedy: str) -> str:
    shown = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else value
    return f"{name} = {shown if shown != '' else '(empty)'}: {remedy}"


def _first_reason(error: ValidationError) -> str:
    reason = error.errors()[0]
    message = reason["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return (
        f"{reason['input']!r}: {message}" if reason["loc"] and isinstance(reason["loc"][-1], int) else message
    )


def _unknown_keys(given: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in given.keys() - types.keys():
        near = difflib.get_close_matches(key, types, n=1)
        lines.append(
            _line(key, given[key], "no such setting" + (f"; did you mean {near[0]}?" if near else ""))
        )
    return sorted(lines)


def _missing_keys(given: Mapping[str, Any], types: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: missing; cdk.json holds every setting with its default" for key in types if key not in given
    ]
