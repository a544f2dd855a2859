"""The training module's zip: Ray must find the package in it, and only a change of code may change it."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import aws_cdk as cdk
import pytest
from ray._private.runtime_env.packaging import unzip_package
from ray_train_eks.job_package import JobPackage, code_digest

ROOT = Path(__file__).parents[2]
ARGUMENTS = ["--steps", "20"]


@pytest.fixture
def module(tmp_path):
    folder = tmp_path / "work" / "training"
    shutil.copytree(ROOT / "training", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def _stage(module, tmp_path, digest="0123456789"):
    """Synthesizes the package; returns the folder that the CDK CLI would zip and upload."""
    app = cdk.App(outdir=str(tmp_path / "cdk.out"))
    stack = cdk.Stack(app, "Stack")
    JobPackage(stack, "Package", module=module, digest=digest, arguments=ARGUMENTS)
    (asset,) = Path(app.synth().directory).glob("asset.*")
    return asset


def test_ray_unpacks_a_package_that_python_finds(module, tmp_path):
    asset = _stage(module, tmp_path)
    zip_path = Path(shutil.make_archive(str(tmp_path / "package"), "zip", asset))
    target = tmp_path / "runtime_resources"
    # As ray.util's runtime environment does for a working_dir of s3://...zip.
    unzip_package(str(zip_path), str(target), remove_top_level_directory=True, unlink_zip=False)
    found = subprocess.run(
        [sys.executable, "-c", "import training.config; print(training.config.__file__)"],
        cwd=target,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(target / "training" / "config.py"), found.stderr


def test_without_the_manifest_ray_would_strip_the_package_away(module, tmp_path):
    """Why the manifest is there: this is what happens without it."""
    asset = _stage(module, tmp_path)
    (asset / "manifest.json").unlink()
    zip_path = Path(shutil.make_archive(str(tmp_path / "package"), "zip", asset))
    target = tmp_path / "runtime_resources"
    unzip_package(str(zip_path), str(target), remove_top_level_directory=True, unlink_zip=False)
    assert not (target / "training").exists()


def test_the_manifest_says_what_runs_and_nothing_that_changes_by_itself(module, tmp_path):
    manifest = json.loads((_stage(module, tmp_path) / "manifest.json").read_text())
    assert manifest == {"digest": "0123456789", "arguments": ARGUMENTS}


def test_caches_and_hidden_files_are_left_out(module, tmp_path):
    (module / "__pycache__").mkdir()
    (module / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"x")
    (module / ".DS_Store").write_bytes(b"x")
    names = [path.name for path in _stage(module, tmp_path).rglob("*")]
    assert "__pycache__" not in names
    assert ".DS_Store" not in names


def test_running_the_code_does_not_change_asset_or_digest(module, tmp_path):
    before = code_digest(module, ARGUMENTS, 10), _stage(module, tmp_path / "a").name
    (module / "__pycache__").mkdir()
    (module / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"x")
    (module / "config.py").touch()
    assert (code_digest(module, ARGUMENTS, 10), _stage(module, tmp_path / "b").name) == before


def test_every_change_of_code_or_arguments_changes_the_digest(module):
    digests = {code_digest(module, ARGUMENTS, 10), code_digest(module, ["--steps", "21"], 10)}
    with (module / "config.py").open("a") as file:
        file.write("# a comment\n")
    digests.add(code_digest(module, ARGUMENTS, 10))
    (module / "config.py").rename(module / "other.py")
    digests.add(code_digest(module, ARGUMENTS, 10))
    (module / "empty.py").touch()
    digests.add(code_digest(module, ARGUMENTS, 10))
    assert len(digests) == 5
    assert {len(digest) for digest in digests} == {10}


def test_a_folder_without_code_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no Python file there"):
        code_digest(tmp_path, ARGUMENTS, 10)


def test_a_zip_of_the_asset_has_two_entries_at_its_top(module, tmp_path):
    asset = _stage(module, tmp_path)
    with zipfile.ZipFile(shutil.make_archive(str(tmp_path / "package"), "zip", asset)) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"training", "manifest.json"}
