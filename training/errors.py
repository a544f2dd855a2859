"""Failures that have a reason a person can act on: shown as their message, never as a traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class JobError(Exception):
    """The run cannot go on. The message says what happened, where, and what to change. Exit code 1."""


class TransportError(JobError):
    """NCCL did not use the network that `require_transport` asks for. The message is the whole report.

    Attributes:
        evidence: what `handshake.prove` would have returned, JSON-ready; empty where nothing was gathered.
    """

    def __init__(self, report: str, evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(report, evidence)  # both, since they are what pickling keeps
        self.evidence = dict(evidence or {})

    def __str__(self) -> str:
        return self.args[0]


class DataError(JobError):
    """Training data that one rank could not use; names the rank and the file."""


class NotFiniteError(JobError):
    """A loss that is NaN or infinite; names step and rank."""
