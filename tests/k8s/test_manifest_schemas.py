"""Every manifest passes the schema the API server will hold it to, for more than the default settings."""

from __future__ import annotations

import kubernetes_validate
import pytest
import yaml

from k8s import injected
from k8s.namespace import namespace
from k8s.network_policy import network_policies
from k8s.ray_cluster import ray_cluster
from k8s.ray_job import ray_job
from k8s.render import FOLDER
from k8s.service_account import service_account

CHANGES = [
    {},
    {"gpu_instance_type": "p4d.24xlarge", "require_gpudirect": True},
    {"num_gpu_nodes": 7, "namespace": "llm-team-a", "ray_cluster_name": "other"},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_ray_objects_pass_kuberays_schema_and_cel_rules(make_settings, find_schema_problems, changes):
    settings = make_settings(**changes)
    job = ray_job(settings, digest="a" * 10, working_dir="s3://a/b.zip", storage_path="s3://c/d")
    assert find_schema_problems(ray_cluster(settings)) == []
    assert find_schema_problems(job) == []


@pytest.mark.parametrize("name", ["4-ray-cluster.yaml", "5-ray-job.yaml"])
def test_the_committed_yaml_of_ray_objects_passes_the_schema(find_schema_problems, name):
    for manifest in yaml.safe_load_all((FOLDER / name).read_text()):
        assert find_schema_problems(manifest) == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[123]-*.yaml")), ids=lambda path: path.name)
def test_the_committed_yaml_of_core_objects_passes_the_schema(settings, path):
    version = settings.cluster.kubernetes_version
    for manifest in yaml.safe_load_all(path.read_text()):
        assert kubernetes_validate.validate(manifest, version, strict=True).startswith(version)


@pytest.mark.parametrize("changes", CHANGES)
def test_core_objects_pass_the_schema_of_the_clusters_version(make_settings, changes):
    settings = make_settings(**changes)
    for manifest in [namespace(settings), service_account(settings), *network_policies(settings)]:
        kubernetes_validate.validate(manifest, settings.cluster.kubernetes_version, strict=True)


def test_pods_pass_the_schema_with_what_kuberay_adds(settings, cluster, job):
    pods = [injected.head_pod(cluster), *injected.worker_pods(cluster).values()]
    pods.append(injected.submitter_pod(job, cluster))
    for spec in pods:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, settings.cluster.kubernetes_version, strict=True)


def test_an_unknown_field_deep_in_a_pod_is_found(cluster, find_schema_problems):
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    assert "imagePulPolicy" in " ".join(find_schema_problems(cluster))


def test_a_number_where_text_belongs_is_found(cluster, find_schema_problems):
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert "num-cpus" in " ".join(find_schema_problems(cluster))


def test_a_broken_cel_rule_is_found(job, find_schema_problems):
    job["spec"]["deletionStrategy"] = {"onSuccess": {"policy": "DeleteSelf"}}
    assert "spec.deletionStrategy" in " ".join(find_schema_problems(job))
