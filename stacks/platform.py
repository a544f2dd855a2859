"""What the cluster needs before Ray can run: device plugins and the KubeRay operator."""

from __future__ import annotations

from aws_cdk import aws_eks_v2 as eks
from ray_train_eks.pinned_chart import Chart, PinnedChart

from constructs import Construct
from k8s.namespace import OPERATOR_NAMESPACE
from k8s.pods import GPU_NODE_LABELS, GPU_TOLERATION, SYSTEM_NODE_LABELS
from settings import NetworkSettings, PlatformSettings
from stacks.app_stack import AppStack


class PlatformStack(AppStack):
    """Three charts at pinned versions."""

    def __init__(
        self,
        scope: Construct,
        id: str,
        network: NetworkSettings,
        *,
        settings: PlatformSettings,
        cluster: eks.ICluster,
        gpu_instance_type: str,
    ) -> None:
        """Installs the charts.

        Args:
            network: Region and zones.
            settings: versions.
            cluster: where to.
            gpu_instance_type: the nodes that have EFA devices.
        """
        super().__init__(scope, id, network, "Platform: NVIDIA and EFA device plugins, KubeRay operator")
        charts = {
            "NvidiaDevicePlugin": _nvidia_device_plugin(settings.nvidia_device_plugin_version),
            "EfaDevicePlugin": _efa_device_plugin(settings.efa_device_plugin_version, gpu_instance_type),
            "KubeRayOperator": _kuberay_operator(settings.kuberay_operator_version),
        }
        for id_, chart in charts.items():
            PinnedChart(self, id_, cluster=cluster, chart=chart)


def _nvidia_device_plugin(version: str) -> Chart:
    return Chart(
        name="nvidia-device-plugin",
        repository="https://nvidia.github.io/k8s-device-plugin",
        version=version,
        namespace="kube-system",
        values={
            # 0.19.0 to 0.19.2 took /dev/infiniband for themselves, and with it the EFA devices.
            "mofedEnabled": False,
            "nodeSelector": GPU_NODE_LABELS,
            "tolerations": [GPU_TOLERATION],
        },
    )


def _efa_device_plugin(version: str, gpu_instance_type: str) -> Chart:
    return Chart(
        name="aws-efa-k8s-device-plugin",
        repository="https://aws.github.io/eks-charts",
        version=version,
        namespace="kube-system",
        values={
            # The chart's own list of types is older than the newest types.
            "supportedInstanceLabels": {
                "keys": ["node.kubernetes.io/instance-type"],
                "values": [gpu_instance_type],
            },
            # By default it tolerates CriticalAddonsOnly alone and would not run on our nodes at all.
            "tolerations": [GPU_TOLERATION],
        },
    )


def _kuberay_operator(version: str) -> Chart:
    return Chart(
        name="kuberay-operator",
        repository="https://ray-project.github.io/kuberay-helm",
        version=version,
        namespace=OPERATOR_NAMESPACE,
        values={"nodeSelector": SYSTEM_NODE_LABELS},
    )
