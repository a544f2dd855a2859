"""Charts: exact versions, and pods that land on the nodes they are for."""

import json

import pytest
from ray_train_eks.manifest import SERVICE_TIMEOUT_S

from k8s.namespace import OPERATOR_NAMESPACE

LAMBDA_TIMEOUT_S = 15 * 60
GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def _charts(assembly):
    found = assembly.resources("Platform", "Custom::AWSCDK-EKS-HelmChart").values()
    return {chart["Properties"]["Chart"]: chart["Properties"] for chart in found}


@pytest.fixture(scope="module")
def values(default):
    return {name: json.loads(chart["Values"]) for name, chart in _charts(default).items()}


def test_three_charts_come_from_their_makers_at_exact_versions(default):
    found = {(chart["Repository"], name, chart["Version"]) for name, chart in _charts(default).items()}
    assert found == {
        ("https://nvidia.github.io/k8s-device-plugin", "nvidia-device-plugin", "0.20.0"),
        ("https://aws.github.io/eks-charts", "aws-efa-k8s-device-plugin", "v0.5.32"),
        ("https://ray-project.github.io/kuberay-helm", "kuberay-operator", "1.7.0"),
    }


def test_helm_waits_and_gives_up_before_its_lambda_does(default):
    for chart in _charts(default).values():
        assert chart["Wait"] is True
        assert int(chart["Timeout"].removesuffix("s")) < LAMBDA_TIMEOUT_S < chart["ServiceTimeout"]
        assert chart["ServiceTimeout"] == SERVICE_TIMEOUT_S


def test_the_operator_runs_on_system_nodes_in_the_namespace_that_the_policies_let_in(default, values):
    assert values["kuberay-operator"]["nodeSelector"] == {"ray-train/role": "system"}
    assert _charts(default)["kuberay-operator"]["Namespace"] == OPERATOR_NAMESPACE
    system_nodes = default.only("Cluster", "AWS::EKS::Nodegroup")
    assert system_nodes["Labels"] == values["kuberay-operator"]["nodeSelector"]


def test_both_device_plugins_tolerate_the_taint_of_the_gpu_nodes(default, values):
    (taint,) = default.only("Nodes", "AWS::EKS::Nodegroup")["Taints"]
    assert taint["Key"] == GPU_TOLERATION["key"]
    for chart in ("nvidia-device-plugin", "aws-efa-k8s-device-plugin"):
        assert GPU_TOLERATION in values[chart]["tolerations"]


def test_the_nvidia_plugin_leaves_the_efa_devices_alone(values):
    assert values["nvidia-device-plugin"]["mofedEnabled"] is False
    assert values["nvidia-device-plugin"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


def test_the_efa_plugin_runs_on_types_newer_than_its_own_list(block):
    efa = json.loads(_charts(block)["aws-efa-k8s-device-plugin"]["Values"])
    assert efa["supportedInstanceLabels"] == {
        "keys": ["node.kubernetes.io/instance-type"],
        "values": ["p5.48xlarge"],
    }
