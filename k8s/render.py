"""Writes the manifests of the settings in cdk.json to k8s/rendered/, for people to read and review.

Usage: python -m k8s.render [--check]

What only a deployment knows (bucket names, the job's digest) appears under a placeholder.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path

import yaml

from k8s.namespace import namespace
from k8s.network_policy import network_policies
from k8s.operator_rules import check
from k8s.pods import Manifest
from k8s.ray_cluster import ray_cluster
from k8s.ray_job import ray_job
from k8s.service_account import service_account
from settings import Settings, SettingsError, load

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "k8s" / "rendered"

PLACEHOLDER_DIGEST = "0123456789abcdef"
PLACEHOLDER_WORKING_DIR = "s3://ASSET-BUCKET/DIGEST.zip"
PLACEHOLDER_STORAGE_PATH = "s3://RESULTS-BUCKET/runs"

_HEADER = "# Written by `make render` from the settings in cdk.json; do not edit.\n"


def render(settings: Settings) -> dict[str, str]:
    """File name -> YAML, in the order in which the objects are applied.

    Raises:
        ValueError: KubeRay's operator would refuse the RayCluster or the RayJob.
    """
    cluster = ray_cluster(settings)
    job = ray_job(
        settings,
        digest=PLACEHOLDER_DIGEST,
        working_dir=PLACEHOLDER_WORKING_DIR,
        storage_path=PLACEHOLDER_STORAGE_PATH,
    )
    check(cluster, job)
    return {
        "1-namespace.yaml": _yaml([namespace(settings)]),
        "2-service-account.yaml": _yaml([service_account(settings)]),
        "3-network-policies.yaml": _yaml(network_policies(settings)),
        "4-ray-cluster.yaml": _yaml([cluster]),
        "5-ray-job.yaml": _yaml([job]),
    }


def stale(rendered: dict[str, str]) -> str:
    """The difference between the files on disk and what they should be; empty when there is none."""
    on_disk = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))}
    lines: list[str] = []
    for name in sorted(on_disk.keys() | rendered.keys()):
        before, after = on_disk.get(name, ""), rendered.get(name, "")
        lines += difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"k8s/rendered/{name}", "as rendered now"
        )
    return "".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k8s.render", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the files are stale")
    arguments = parser.parse_args(argv)
    try:
        rendered = render(load(json.loads((ROOT / "cdk.json").read_text(encoding="utf-8"))["context"]))
    except (SettingsError, ValueError) as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 1
    difference = stale(rendered)
    if arguments.check:
        print(
            difference + ("error: k8s/rendered is stale; run `make render`" if difference else "up to date")
        )
        return 1 if difference else 0
    _write(rendered)
    return 0


def _write(rendered: dict[str, str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.yaml"):
        if path.name not in rendered:
            path.unlink()
    for name, text in rendered.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


class _Dumper(yaml.SafeDumper):
    """Lists indented under their key and no anchors, as Kubernetes documentation writes YAML."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    """Text of several lines as a block, which reads as it is."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(manifests: list[Manifest]) -> str:
    return _HEADER + yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=110)


if __name__ == "__main__":
    sys.exit(main())
