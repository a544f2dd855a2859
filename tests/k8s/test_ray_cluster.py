"""What the RayCluster promises: sizes as Ray reads them, pods that fit their nodes, no privilege to spare."""

from __future__ import annotations

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.scripts.scripts import start
from ray_train_eks.instance_types import INSTANCE_TYPES, allocatable, system_pods

from k8s import injected
from k8s.pods import SYSTEM_NODE_LABELS
from k8s.qos import qos_class, quantity
from k8s.ray_cluster import ray_cluster
from k8s.ray_job import SUBMITTER_RESOURCES

GPU_TYPES = [instance for instance in INSTANCE_TYPES.values() if instance.num_gpus and instance.efa_cards]

# What runs on a GPU node beside the worker: requests of the DaemonSets' default manifests (aws-node with the
# policy agent, kube-proxy, node monitoring agent, EFA plugin; the NVIDIA plugin and the Pod Identity agent
# ask for nothing), and room for a log and metrics agent.
DAEMON_SETS_MILLICORES = 50 + 100 + 10 + 10 + 300
DAEMON_SETS_MIB = 30 + 20 + 512


def _container(group):
    return group["template"]["spec"]["containers"][0]


def _head(cluster):
    return _container(cluster["spec"]["headGroupSpec"])


def _worker(cluster):
    return _container(cluster["spec"]["workerGroupSpecs"][0])


def _env(container):
    return {one["name"]: one["value"] for one in container["env"]}


@pytest.fixture(params=GPU_TYPES, ids=lambda instance: instance.name)
def instance(request):
    return request.param


def test_ray_reads_eight_gpus_and_a_head_without_cpus(cluster):
    nodes = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    assert nodes["headgroup"]["resources"]["CPU"] == 0
    assert "GPU" not in nodes["headgroup"]["resources"]
    worker = nodes["gpu"]
    assert worker["resources"] == {"CPU": 40, "GPU": 4, "memory": 160 * 2**30}
    assert worker["min_workers"] == worker["max_workers"] == 2
    assert worker["max_workers"] * worker["resources"]["GPU"] == 8


def test_ray_reads_the_gpus_of_every_instance_type(make_settings, instance):
    settings = make_settings(gpu_instance_type=instance.name, num_gpu_nodes=3)
    worker = _derive_autoscaling_config_from_ray_cr(ray_cluster(settings))["available_node_types"]["gpu"]
    assert worker["resources"]["GPU"] == instance.num_gpus
    assert worker["min_workers"] == worker["max_workers"] == 3


@pytest.mark.parametrize("group", ["head", "worker"])
def test_ray_start_accepts_the_parameters(cluster, group):
    spec = cluster["spec"]
    params = (spec["headGroupSpec"] if group == "head" else spec["workerGroupSpecs"][0])["rayStartParams"]
    flags = ["--head"] if group == "head" else ["--address=llm-head-svc.ray.svc.cluster.local:6379"]
    parsed = start.make_context("ray start", flags + [f"--{name}={value}" for name, value in params.items()])
    assert parsed.params["num_cpus"] == (0 if group == "head" else None)


def test_the_worker_pod_is_the_one_the_instance_type_allows(cluster):
    amounts = {"cpu": "40", "memory": "160Gi", "nvidia.com/gpu": "4", "vpc.amazonaws.com/efa": "1"}
    assert _worker(cluster)["resources"] == {"requests": amounts, "limits": amounts}


def test_the_worker_fits_beside_the_daemon_sets_of_every_gpu_type(make_settings, instance):
    worker = _worker(ray_cluster(make_settings(gpu_instance_type=instance.name)))
    asked, node = worker["resources"]["requests"], allocatable(instance)
    assert quantity(asked["cpu"]) * 1000 + DAEMON_SETS_MILLICORES <= node.cpu_millicores
    assert quantity(asked["memory"]) / 2**20 + DAEMON_SETS_MIB <= node.memory_mib
    assert int(asked["nvidia.com/gpu"]) == instance.num_gpus
    assert int(asked["vpc.amazonaws.com/efa"]) == instance.efa_cards


def test_head_and_submitter_fit_on_the_system_node(settings, cluster):
    # system_pods() counts the submitter already; that it asks for as much is the next test's matter.
    node, others = allocatable(settings.cluster.system_instance), system_pods()
    asked = _head(cluster)["resources"]["requests"]
    assert quantity(asked["cpu"]) * 1000 + others.cpu_millicores <= node.cpu_millicores
    assert quantity(asked["memory"]) / 2**20 + others.memory_mib <= node.memory_mib


def test_the_submitter_asks_for_what_the_system_node_keeps_free():
    from ray_train_eks.instance_types import SYSTEM_PODS

    (reserved,) = [pod for pod in SYSTEM_PODS if pod.name == "RayJob submitter"]
    assert quantity(SUBMITTER_RESOURCES["cpu"]) * 1000 == reserved.cpu_millicores
    assert quantity(SUBMITTER_RESOURCES["memory"]) / 2**20 == reserved.memory_mib


def test_every_pod_is_guaranteed_with_what_kuberay_adds(cluster, job):
    pods = {"head": injected.head_pod(cluster), **injected.worker_pods(cluster)}
    pods["submitter"] = injected.submitter_pod(job, cluster)
    assert {name: qos_class(pod) for name, pod in pods.items()} == dict.fromkeys(pods, "Guaranteed")


def test_a_worker_waits_for_the_head_with_the_token_and_its_own_security_context(cluster):
    (waiting,) = injected.worker_pods(cluster)["gpu"]["initContainers"]
    assert waiting["name"] == "wait-gcs-ready"
    assert waiting["securityContext"] == _worker(cluster)["securityContext"]
    assert "RAY_AUTH_TOKEN" in [one["name"] for one in waiting["env"]]


def test_shared_memory_is_as_large_as_the_pods_memory(cluster):
    volumes = injected.worker_pods(cluster)["gpu"]["volumes"]
    assert {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": "160Gi"}} in volumes


def test_nccl_and_libfabric_are_told_to_use_efa(cluster):
    wanted = {
        "FI_PROVIDER": "efa",
        "NCCL_NET_PLUGIN": "ofi",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
    }
    assert wanted.items() <= _env(_worker(cluster)).items()
    assert "FI_EFA_USE_DEVICE_RDMA" not in _env(_worker(cluster))


def test_device_rdma_is_asked_for_exactly_where_the_type_has_it(make_settings, instance):
    worker = _worker(ray_cluster(make_settings(gpu_instance_type=instance.name)))
    assert (_env(worker).get("FI_EFA_USE_DEVICE_RDMA") == "1") == instance.gpudirect


def test_the_head_sees_no_gpu_and_runs_on_a_system_node(cluster):
    spec = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert _env(_head(cluster))["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert spec["nodeSelector"] == SYSTEM_NODE_LABELS
    assert "tolerations" not in spec


def test_workers_tolerate_the_gpu_taint_and_never_share_a_node(cluster):
    spec = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    (term,) = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"].items() <= injected.pod_labels(cluster, "worker").items()


def test_only_workers_get_a_capability_and_no_container_gets_more(cluster, job):
    pods = [injected.head_pod(cluster), *injected.worker_pods(cluster).values()]
    pods.append(injected.submitter_pod(job, cluster))
    added = []
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        assert all("hostPath" not in volume for volume in pod.get("volumes", []))
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and "privileged" not in security
            assert security["seccompProfile"] == {"type": "RuntimeDefault"}
            assert security["capabilities"]["drop"] == ["ALL"]
            added.append((container["name"], security["capabilities"].get("add", [])))
    assert [pair for pair in added if pair[1]] == [
        ("ray-worker", ["IPC_LOCK"]),
        ("wait-gcs-ready", ["IPC_LOCK"]),
    ]


def test_only_ray_nodes_have_the_identity_that_reaches_s3(cluster, job):
    assert injected.head_pod(cluster)["serviceAccountName"] == "ray-train"
    assert injected.worker_pods(cluster)["gpu"]["serviceAccountName"] == "ray-train"
    assert "serviceAccountName" not in injected.submitter_pod(job, cluster)


def test_the_image_of_the_settings_runs_everywhere(make_settings):
    cluster = ray_cluster(make_settings(image="example.com/ray:v1.2.3"))
    assert _head(cluster)["image"] == _worker(cluster)["image"] == "example.com/ray:v1.2.3"


def test_our_labels_leave_kuberays_alone(cluster):
    """The head's Service finds the head by labels that a template could override."""
    for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        assert "metadata" not in group["template"] and "labels" not in group
