"""Who reaches whom, worked out from the policies as Kubernetes defines them.

A connection passes if neither end is selected by a policy for its direction, or one policy that selects it
allows the other end and the port; both ends must agree.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

import pytest

from k8s import injected
from k8s.network_policy import network_policies
from k8s.pods import RAY_NODE_TYPE_LABEL


@dataclass(frozen=True)
class Pod:
    namespace: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Address:
    ip: str


def _selects(selector, labels):
    assert selector.keys() <= {"matchLabels"}, "this reader knows matchLabels only"
    return selector.get("matchLabels", {}).items() <= labels.items()


def _is_peer(peer, end, own_namespace):
    if isinstance(end, Address):
        block = peer.get("ipBlock")
        ip = ipaddress.ip_address(end.ip)
        inside = [ip in ipaddress.ip_network(cidr) for cidr in (block or {}).get("except", [])]
        return bool(block) and ip in ipaddress.ip_network(block["cidr"]) and not any(inside)
    if "ipBlock" in peer:  # a pod's address, which no rule here means
        return False
    spaces = peer.get("namespaceSelector")
    if spaces is None:
        right_namespace = end.namespace == own_namespace
    else:
        right_namespace = _selects(spaces, {"kubernetes.io/metadata.name": end.namespace})
    return right_namespace and _selects(peer.get("podSelector", {}), end.labels)


def _passes(policies, pod, other, port, protocol, direction):
    """Whether the policies on `pod` let it talk with `other` in one direction."""
    if isinstance(pod, Address):
        return True
    here = [one for one in policies if one["metadata"]["namespace"] == pod.namespace]
    selecting = [
        one["spec"]
        for one in here
        if _selects(one["spec"]["podSelector"], pod.labels) and direction in one["spec"]["policyTypes"]
    ]
    if not selecting:
        return True
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    side = {"Ingress": "from", "Egress": "to"}[direction]
    wanted = {"protocol": protocol, "port": port}
    return any(
        any(_is_peer(peer, other, pod.namespace) for peer in rule[side])
        and ("ports" not in rule or wanted in rule["ports"])
        for rule in rules
    )


@pytest.fixture
def reaches(settings):
    policies = network_policies(settings)

    def answer(source, target, port, protocol="TCP"):
        leaves = _passes(policies, source, target, port, protocol, "Egress")
        return leaves and _passes(policies, target, source, port, protocol, "Ingress")

    return answer


@pytest.fixture
def ends(cluster, job):
    """Pods with the labels they really get, and addresses."""
    submitter = job["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    operators = {"ray.io/originated-from-crd": "RayJob", "ray.io/originated-from-cr-name": "llm-0"}
    namespace = cluster["metadata"]["namespace"]
    other_cluster = injected.pod_labels(cluster, "worker") | {"ray.io/cluster": "other"}
    return {
        "head": Pod(namespace, injected.pod_labels(cluster, "head")),
        "worker": Pod(namespace, injected.pod_labels(cluster, "worker")),
        "submitter": Pod(namespace, submitter | operators),
        "neighbour": Pod(namespace, {"app": "notebook"}),
        "other cluster": Pod(namespace, other_cluster),
        "stranger": Pod("default", {RAY_NODE_TYPE_LABEL: "worker", "ray.io/cluster": "llm"}),
        "operator": Pod("kuberay-operator", {"app.kubernetes.io/name": "kuberay-operator"}),
        "in operator's namespace": Pod("kuberay-operator", {"app": "shell"}),
        "dns": Pod("kube-system", {"k8s-app": "kube-dns"}),
        "in kube-system": Pod("kube-system", {"k8s-app": "metrics-server"}),
        "s3": Address("52.219.100.1"),
        "hugging face": Address("18.164.174.55"),
        "pod identity": Address("169.254.170.23"),
        "instance metadata": Address("169.254.169.254"),
        "api server in the vpc": Address("10.0.1.17"),
        "api server's service": Address("172.20.0.1"),
        "peered network": Address("192.168.4.4"),
    }


NEEDED = [
    ("submitter", "head", 8265, "TCP"),
    ("operator", "head", 8265, "TCP"),
    ("worker", "head", 6379, "TCP"),
    ("head", "worker", 10002, "TCP"),
    ("worker", "worker", 43211, "TCP"),
    ("head", "dns", 53, "UDP"),
    ("worker", "dns", 53, "TCP"),
    ("submitter", "dns", 53, "UDP"),
    ("worker", "s3", 443, "TCP"),
    ("head", "s3", 443, "TCP"),
    ("worker", "hugging face", 443, "TCP"),
    ("worker", "pod identity", 80, "TCP"),
    ("head", "pod identity", 80, "TCP"),
]
REFUSED = [
    ("neighbour", "head", 8265, "TCP"),
    ("stranger", "head", 8265, "TCP"),
    ("stranger", "worker", 10002, "TCP"),
    ("other cluster", "head", 6379, "TCP"),
    ("in operator's namespace", "head", 8265, "TCP"),
    ("operator", "head", 6379, "TCP"),
    ("operator", "worker", 8265, "TCP"),
    ("submitter", "head", 6379, "TCP"),
    ("submitter", "worker", 10002, "TCP"),
    ("submitter", "s3", 443, "TCP"),
    ("submitter", "pod identity", 80, "TCP"),
    ("worker", "submitter", 22, "TCP"),
    ("worker", "stranger", 443, "TCP"),
    ("worker", "in kube-system", 53, "UDP"),
    ("worker", "dns", 9153, "TCP"),
    ("worker", "hugging face", 80, "TCP"),
    ("worker", "instance metadata", 80, "TCP"),
    ("worker", "instance metadata", 443, "TCP"),
    ("head", "instance metadata", 80, "TCP"),
    ("worker", "pod identity", 443, "TCP"),
    ("worker", "api server in the vpc", 443, "TCP"),
    ("worker", "api server's service", 443, "TCP"),
    ("worker", "peered network", 443, "TCP"),
    ("neighbour", "s3", 443, "TCP"),
]


@pytest.mark.parametrize(("source", "target", "port", "protocol"), NEEDED)
def test_what_the_job_needs_passes(reaches, ends, source, target, port, protocol):
    assert reaches(ends[source], ends[target], port, protocol)


@pytest.mark.parametrize(("source", "target", "port", "protocol"), REFUSED)
def test_what_the_job_does_not_need_is_refused(reaches, ends, source, target, port, protocol):
    assert not reaches(ends[source], ends[target], port, protocol)


def test_every_pod_of_the_namespace_is_denied_first(settings):
    spec = network_policies(settings)[0]["spec"]
    assert spec == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_a_vpc_outside_the_usual_private_ranges_is_closed_too(make_settings):
    policies = network_policies(make_settings(vpc_cidr="198.18.0.0/16"))
    head = Pod("ray", {"ray.io/cluster": "llm"})
    assert not _passes(policies, head, Address("198.18.3.4"), 443, "TCP", "Egress")


def test_policies_have_names_of_their_own(settings):
    names = [policy["metadata"]["name"] for policy in network_policies(settings)]
    assert len(names) == len(set(names))
