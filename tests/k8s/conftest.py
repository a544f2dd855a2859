"""Manifests of the default settings, and KubeRay's schemas as strict validators."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cel
import pytest
import yaml
from jsonschema import Draft202012Validator

from k8s.ray_cluster import ray_cluster
from k8s.ray_job import ray_job
from settings import Settings, load

ROOT = Path(__file__).parents[2]
DIGEST = "0123456789abcdef"


@pytest.fixture(scope="session")
def make_settings() -> Callable[..., Settings]:
    """The settings of cdk.json with some of them changed: `make_settings(num_gpu_nodes=4)`."""
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    return lambda **changes: load(context | changes)


@pytest.fixture(scope="session")
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings()


@pytest.fixture
def cluster(settings: Settings) -> dict[str, Any]:
    return ray_cluster(settings)


@pytest.fixture
def job(settings: Settings) -> dict[str, Any]:
    return ray_job(settings, digest=DIGEST, working_dir="s3://assets/0.zip", storage_path="s3://results/runs")


# --- KubeRay's schemas ------------------------------------------------------------------------------------


@functools.cache
def _crd_folder(version: str) -> Path | None:
    """CRDs beside the repository, else out of the operator's chart."""
    beside = ROOT.parent / "shared" / "kuberay"
    if beside.is_dir():
        return beside
    helm = shutil.which("helm")
    target = ROOT / ".pytest_cache" / f"kuberay-{version}"
    crds = target / "kuberay-operator" / "crds"
    if helm and not crds.is_dir():
        repository = "https://ray-project.github.io/kuberay-helm/"
        pull = [helm, "pull", "kuberay-operator", "--repo", repository, "--version", version]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([*pull, "--untar", "--untardir", str(target)], check=False, timeout=30)
    return crds if crds.is_dir() else None


@pytest.fixture(scope="session")
def find_schema_problems(settings: Settings) -> Callable[[dict[str, Any]], list[str]]:
    """What a real API server would say of a RayCluster or RayJob, unknown fields and CEL rules included."""
    folder = _crd_folder(settings.platform.kuberay_operator_version)
    if folder is None:
        pytest.skip("KubeRay's CRDs are neither in ../shared/kuberay nor can helm pull them")

    @functools.cache
    def schema(kind: str) -> dict[str, Any]:
        text = (folder / f"ray.io_{kind.lower()}s.yaml").read_text()
        versions = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]["versions"]
        return next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1")

    @functools.cache
    def validator(kind: str) -> Draft202012Validator:
        strict = _strict(schema(kind))
        strict["properties"]["metadata"] = {"type": "object"}  # checked by the server, not by the CRD
        return Draft202012Validator(strict)

    def problems(manifest: dict[str, Any]) -> list[str]:
        errors = validator(manifest["kind"]).iter_errors(manifest)
        found = [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]
        return found + list(_broken_cel_rules(schema(manifest["kind"]), manifest))

    return problems


def _strict(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a Kubernetes structural schema in which an unknown field is an error."""
    schema = copy.copy(schema)
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("anyOf", None)
        schema["type"] = ["integer", "string"]
    if schema.get("nullable"):
        schema["type"] = [schema["type"], "null"]
    if "properties" in schema:
        schema["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            schema[keyword] = _strict(schema[keyword])
    return schema


def _broken_cel_rules(schema: dict[str, Any], value: Any, path: str = "") -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        if re.search(r"\boldSelf\b", rule["rule"]):
            continue  # compares an update with what was there before
        if cel.evaluate(rule["rule"], cel.Context(variables={"self": value})) is not True:
            yield f"{path}: {rule.get('message', rule['rule'])}"
    for name, below in schema.get("properties", {}).items():
        if isinstance(value, dict) and name in value:
            yield from _broken_cel_rules(below, value[name], f"{path}.{name}")
    for index, item in enumerate(value if isinstance(value, list) else []):
        yield from _broken_cel_rules(schema.get("items", {}), item, f"{path}[{index}]")
