"""Failures that have a reason a person can act on: shown as their message, never as a traceback."""

from __future__ import annotations


class JobError(Exception):
    """The run cannot go on. The message says what happened, where, and what to change. Exit code 1."""


class TransportError(JobError):
    """NCCL did not use the network that `require_transport` asks for. The message is the whole report."""


class DataError(JobError):
    """Training data that one rank could not use; names the rank and the file."""


class NotFiniteError(JobError):
    """A loss that is NaN or infinite; names step and rank."""
