"""The training module as the RayJob's working directory: one content-addressed zip in S3."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3_assets as s3_assets

from constructs import Construct

MANIFEST = "manifest.json"
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")


def code_digest(module: Path, arguments: Sequence[str], length: int) -> str:
    """Digest of a module's files and of the arguments it runs with.

    Args:
        module: folder of a Python package.
        arguments: the command line.
        length: hexadecimal digits to return.

    Raises:
        FileNotFoundError: the folder holds no Python file.
    """
    digest = hashlib.sha256(json.dumps(list(arguments)).encode())
    with tempfile.TemporaryDirectory() as scratch:
        copy = _copy(module, Path(scratch))
        for path in sorted(path for path in copy.rglob("*") if path.is_file()):
            name = path.relative_to(copy).as_posix()
            digest.update(f"\0{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:length]


class JobPackage(Construct):
    """A zip with the module's folder and a manifest beside it.

    Ray strips the single top-level folder of a working directory's zip: without the manifest, or with the
    module's files at the root, `python -m <module>.run` would find no package.

    The manifest names digest and arguments, and no commit: unchanged code gives an unchanged zip.

    Attributes:
        url: s3:// address of the zip.
    """

    def __init__(
        self, scope: Construct, id: str, *, module: Path, digest: str, arguments: Sequence[str]
    ) -> None:
        """Stages the zip.

        Args:
            module: folder of the Python package to run.
            digest: what `code_digest` says of module and arguments.
            arguments: the command line, for whoever opens the zip later.

        Raises:
            FileNotFoundError: the folder holds no Python file.
        """
        super().__init__(scope, id)
        with tempfile.TemporaryDirectory() as scratch:
            _copy(module, Path(scratch))
            manifest = {"digest": digest, "arguments": list(arguments)}
            (Path(scratch) / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            self._asset = s3_assets.Asset(self, "Asset", path=scratch)
        self.url = self._asset.s3_object_url

    def grant_read_to(self, role: iam.Role) -> None:
        """Lets a role read exactly this zip; `Asset.grant_read` would open the whole bucket of assets."""
        key = self._asset.bucket.arn_for_objects(self._asset.s3_object_key)
        role.add_to_policy(iam.PolicyStatement(actions=["s3:GetObject"], resources=[key]))


def _copy(module: Path, into: Path) -> Path:
    if not any(module.glob("*.py")):
        raise FileNotFoundError(f"{module}: no Python file there; name the folder of the training module")
    return Path(shutil.copytree(module, into / module.name, ignore=_LEFT_OUT))
