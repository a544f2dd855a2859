"""The real CDK CLI on the real app."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STACKS = ["Network", "Cluster", "Nodes", "Platform", "Training"]


def _cdk(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the pinned CLI without credentials."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    folders = [Path(sys.executable).parent, ROOT / "node_modules" / ".bin"]
    path = os.pathsep.join([*map(str, folders), kept["PATH"]])
    command = shutil.which("cdk", path=path)
    assert command, "the CDK CLI is not installed; run npm ci"
    quiet = ["--no-notices", "--no-version-reporting"]
    environment = kept | {"PATH": path, "AWS_EC2_METADATA_DISABLED": "true"}
    return subprocess.run(
        [command, *arguments, *quiet], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "cdk.out"
    done = _cdk("synth", "--quiet", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    return folder, done.stdout + done.stderr


def test_synth_writes_five_stacks_and_warns_of_the_moving_tag(assembly):
    folder, output = assembly
    written = {path.name.removesuffix(".template.json") for path in folder.glob("*.template.json")}
    assert written == {f"ray-train-{stack}" for stack in STACKS}
    assert "the tag train-ml-cuda-v1.1 moves" in output
    assert "vX.Y.Z" in output
    assert "9.55 USD an hour" in output
    assert "end-of-life" not in output


@pytest.mark.parametrize("stack", STACKS)
def test_diff_against_the_last_synth_shows_no_differences(assembly, stack):
    folder, _ = assembly
    name = f"ray-train-{stack}"
    template = folder / f"{name}.template.json"
    done = _cdk("diff", "--app", str(folder), "--exclusively", "--template", str(template), name)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "There were no differences" in output


def test_wrong_settings_are_all_named_and_exit_with_1_and_no_traceback(tmp_path):
    wrong = ["-c", "gpu_az=eu-west-1a", "-c", "stepz=3", "-c", "head_cpu=4", "-c", "capacity=reservation"]
    done = _cdk("synth", "--quiet", "--output", str(tmp_path), *wrong)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert {line.split()[1] for line in errors} == {"gpu_az", "stepz", "head_cpu", "capacity_reservation_id"}
    assert "Traceback" not in done.stdout + done.stderr
    assert "did you mean steps?" in done.stderr
