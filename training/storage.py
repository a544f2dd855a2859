"""Files on the places a run can name: a local path, or a URI such as s3://bucket/key (through pyarrow).

An S3 endpoint other than AWS's is named by `AWS_ENDPOINT_URL` in the environment, as for the AWS SDKs, or by
`s3://bucket/key?endpoint_override=host:port&scheme=http`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pyarrow import ArrowException
from pyarrow.fs import FileSystem, FileType, LocalFileSystem

STORAGE_ERRORS = (OSError, ArrowException)
"""What any function here may raise: the place does not exist, is not reachable, or refuses access."""

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """A file or folder.

    Attributes:
        filesystem: pyarrow's file system that holds it.
        path: the path inside that file system.
    """

    filesystem: FileSystem
    path: str

    def child(self, name: str) -> Place:
        """The entry `name` of this folder."""
        return Place(self.filesystem, f"{self.path.rstrip('/')}/{name}")

    @property
    def is_local(self) -> bool:
        """Whether the place is on a disk of this machine, where files can be appended to."""
        return isinstance(self.filesystem, LocalFileSystem)

    def is_file(self) -> bool:
        return self.filesystem.get_file_info(self.path).type == FileType.File

    def exists(self) -> bool:
        return self.filesystem.get_file_info(self.path).type != FileType.NotFound

    def write(self, content: bytes) -> None:
        """Replaces the file's content, at once; missing local folders are made."""
        path = self.path
        if self.is_local:  # S3 shows an object only when it is complete
            os.makedirs(os.path.dirname(path), exist_ok=True)
            path += ".partial"
        with self.filesystem.open_output_stream(path) as stream:
            stream.write(content)
        if self.is_local:
            os.replace(path, self.path)

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The file's content in pieces of at most 1 MiB."""
        with self.filesystem.open_input_stream(self.path) as stream:
            while chunk := stream.read(_READ_BYTES):
                yield chunk


def is_uri(text: str) -> bool:
    """Whether `text` is `scheme://...` rather than a local path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text) is not None


def absolute(text: str) -> str:
    """A local path made absolute, since Ray's workers change their working folder; URIs stay as they are."""
    return text if is_uri(text) else os.path.abspath(text)


def locate(text: str) -> Place:
    """The place that a path or URI names.

    Raises:
        OSError, ArrowException: a URI that pyarrow cannot resolve.
    """
    if not is_uri(text):
        return Place(LocalFileSystem(), os.path.abspath(text))
    filesystem, path = FileSystem.from_uri(text)
    return Place(filesystem, path)


def one_line(error: BaseException) -> str:
    """The first line of an error's message; of pyarrow's and the system's, only the reason.

    The caller says which file it was.
    """
    text = str(error).strip().partition("\n")[0] or type(error).__name__
    reason = re.search(r".*\[errno \d+\] (?P<reason>[^:]+)", text, re.IGNORECASE)
    return reason["reason"] if reason else text
