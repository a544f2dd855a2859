"""The YAML that reviewers read is the YAML that is deployed."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from k8s import render


@pytest.fixture
def copied_folder(tmp_path, monkeypatch):
    folder = tmp_path / "rendered"
    shutil.copytree(render.FOLDER, folder)
    monkeypatch.setattr(render, "FOLDER", folder)
    return folder


@pytest.fixture
def own_root(tmp_path, monkeypatch):
    """A repository root of its own, so that cdk.json can be changed."""
    shutil.copy(render.ROOT / "cdk.json", tmp_path)
    monkeypatch.setattr(render, "ROOT", tmp_path)
    return tmp_path


def test_committed_yaml_is_up_to_date(capsys):
    assert render.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_file_fails_the_check_with_the_difference(copied_folder, capsys):
    path = copied_folder / "4-ray-cluster.yaml"
    path.write_text(path.read_text().replace("160Gi", "150Gi"))
    assert render.main(["--check"]) == 1
    shown = capsys.readouterr().out
    assert "150Gi" in shown and "160Gi" in shown and "make render" in shown
    assert "150Gi" in path.read_text(), "--check wrote a file"


def test_a_file_too_many_fails_the_check_and_goes_when_rendered(copied_folder):
    (copied_folder / "9-old.yaml").write_text("kind: Old\n")
    assert render.main(["--check"]) == 1
    assert render.main([]) == 0
    assert not (copied_folder / "9-old.yaml").exists()
    assert render.main(["--check"]) == 0


def test_wrong_settings_end_with_one_line_each_and_no_traceback(own_root, capsys):
    cdk = json.loads((own_root / "cdk.json").read_text())
    cdk["context"] |= {"num_gpu_nodes": 0, "ray_cluster_name": "No"}
    (own_root / "cdk.json").write_text(json.dumps(cdk))
    assert render.main([]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)


def test_objects_are_numbered_in_the_order_in_which_they_are_applied():
    kinds = [
        document["kind"]
        for path in sorted(render.FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]
    order = list(dict.fromkeys(kinds))
    assert order == ["Namespace", "ServiceAccount", "NetworkPolicy", "RayCluster", "RayJob"]


def test_no_object_opens_a_port_to_the_outside():
    for path in render.FOLDER.glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            assert document["kind"] not in ("Service", "Ingress", "Gateway", "HTTPRoute")
            head = document["spec"].get("headGroupSpec", {}) if "spec" in document else {}
            assert head.get("serviceType", "ClusterIP") == "ClusterIP"
            assert "headService" not in head and not head.get("enableIngress")
