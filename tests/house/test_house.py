"""The shape of the repository that other things rely on."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ("requirements.txt", "requirements-cdk.txt")


@pytest.mark.parametrize("folder", ["constructs", "tests", "tests/constructs"])
def test_folders_that_would_shadow_the_constructs_package_are_no_packages(folder):
    """`constructs/__init__.py` makes `import aws_cdk` fail: No module named 'constructs._jsii'."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_the_cdk_imports_from_the_repository_s_root():
    done = subprocess.run(
        [sys.executable, "-c", "import constructs, sys; sys.exit(not constructs.__file__)"], cwd=ROOT
    )
    assert done.returncode == 0


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_requirement_is_pinned_exactly(name):
    for line in (ROOT / name).read_text().splitlines():
        requirement = line.split("#")[0].strip()
        if requirement and not requirement.startswith("-"):
            assert re.fullmatch(r"[\w.-]+(\[[\w,]+\])?==[\w.]+", requirement), requirement


def test_the_contracted_packages_are_required():
    text = "".join((ROOT / name).read_text() for name in REQUIREMENTS)
    cdk = ("aws-cdk-lib", "constructs", "aws-cdk.lambda-layer-kubectl-v30")
    for package in (*cdk, "ray[", "torch", "transformers", "pytest"):
        assert f"\n{package}" in text


def test_a_pipeline_that_only_deploys_does_not_download_pytorch():
    text = (ROOT / "requirements-cdk.txt").read_text()
    assert "torch" not in re.sub("#.*", "", text)
    assert "-r requirements-cdk.txt" in (ROOT / "requirements.txt").read_text()


def test_the_training_package_compiles_on_every_supported_python():
    """Syntax of the oldest supported version; ruff's target-version says the same to the linter."""
    for path in (ROOT / "training").glob("**/*.py"):
        ast.parse(path.read_text(), feature_version=(3, 11))
