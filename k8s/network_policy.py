"""Who may talk to whom in the job's namespace.

Everything is denied first, then allowed by name. Enforced only where the VPC CNI's network policy agent is
switched on (stacks/cluster.py does so).

What these policies do not cover:
- EFA. Its traffic bypasses the kernel, where policies are enforced: what may reach the EFA devices is decided
  by the EFA security group alone.
- Encryption. Ray's token proves who asks; the bytes between pods are plain.
- The node itself. The kubelet's probes (port 52365) and `kubectl port-forward` come from the pod's own node,
  which Kubernetes always lets through; host-network pods are not selected by any policy.
- The first seconds of a pod, under the CNI's default mode `standard`: all is allowed until its agent has
  learnt of the pod. Mode `strict` closes that, for every pod of the cluster.
"""

from __future__ import annotations

import ipaddress

from k8s.namespace import OPERATOR_NAMESPACE
from k8s.pods import RAY_CLUSTER_LABEL, RAY_NODE_TYPE_LABEL, Manifest, labels
from k8s.ray_job import SUBMITTER_LABELS
from settings import Settings

JOB_SERVER_PORT = 8265  # Ray's dashboard and job server, on the head

_HTTPS = {"protocol": "TCP", "port": 443}
_DNS = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]

# EKS Pod Identity's agent: https://docs.aws.amazon.com/eks/latest/userguide/pod-id-agent-setup.html.
# The instance metadata service, 169.254.169.254, is in no allow rule.
_POD_IDENTITY_CIDR = "169.254.170.23/32"

# "Anywhere on 443" means the internet and S3 (its gateway endpoint keeps S3's public addresses), not what
# else is inside: the Kubernetes API (VPC and service addresses), peered networks, link-local services.
_PRIVATE_CIDRS = ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"]


def network_policies(settings: Settings) -> list[Manifest]:
    """All policies of the namespace; what none of them allows is denied."""
    return [
        _default_deny(settings),
        _dns(settings),
        _ray_nodes(settings),
        _job_server(settings),
        _submitter(settings),
        _outside(settings),
    ]


def _default_deny(settings: Settings) -> Manifest:
    spec = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    return _policy(settings, "default-deny", spec)


def _dns(settings: Settings) -> Manifest:
    spec = {
        "podSelector": {},
        "policyTypes": ["Egress"],
        "egress": [{"to": [_pods("kube-system", {"k8s-app": "kube-dns"})], "ports": _DNS}],
    }
    return _policy(settings, "dns", spec)


def _ray_nodes(settings: Settings) -> Manifest:
    """Head and workers of one cluster, on all ports: Ray and NCCL's bootstrap choose theirs at run time."""
    peers = [{"podSelector": {"matchLabels": _ray_nodes_of(settings)}}]
    spec = {
        "podSelector": {"matchLabels": _ray_nodes_of(settings)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": peers}],
        "egress": [{"to": peers}],
    }
    return _policy(settings, "ray-nodes", spec)


def _job_server(settings: Settings) -> Manifest:
    """The submitter submits the job and follows its log; the operator asks for the job's status."""
    clients = [
        {"podSelector": {"matchLabels": SUBMITTER_LABELS}},
        _pods(OPERATOR_NAMESPACE, {"app.kubernetes.io/name": "kuberay-operator"}),
    ]
    spec = {
        "podSelector": {"matchLabels": _head_of(settings)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": clients, "ports": [{"protocol": "TCP", "port": JOB_SERVER_PORT}]}],
    }
    return _policy(settings, "job-server", spec)


def _submitter(settings: Settings) -> Manifest:
    head = [{"podSelector": {"matchLabels": _head_of(settings)}}]
    spec = {
        "podSelector": {"matchLabels": SUBMITTER_LABELS},
        "policyTypes": ["Egress"],
        "egress": [{"to": head, "ports": [{"protocol": "TCP", "port": JOB_SERVER_PORT}]}],
    }
    return _policy(settings, "submitter", spec)


def _outside(settings: Settings) -> Manifest:
    """What training needs from outside: S3 and Hugging Face over HTTPS, and credentials for S3."""
    anywhere = {"cidr": "0.0.0.0/0", "except": _inside(settings)}
    pod_identity = {"cidr": _POD_IDENTITY_CIDR}
    spec = {
        "podSelector": {"matchLabels": _ray_nodes_of(settings)},
        "policyTypes": ["Egress"],
        "egress": [
            {"to": [{"ipBlock": anywhere}], "ports": [_HTTPS]},
            {"to": [{"ipBlock": pod_identity}], "ports": [{"protocol": "TCP", "port": 80}]},
        ],
    }
    return _policy(settings, "outside", spec)


def _inside(settings: Settings) -> list[str]:
    vpc = ipaddress.ip_network(settings.network.vpc_cidr)
    covered = any(vpc.subnet_of(ipaddress.ip_network(cidr)) for cidr in _PRIVATE_CIDRS)
    return _PRIVATE_CIDRS if covered else sorted([*_PRIVATE_CIDRS, str(vpc)])


def _ray_nodes_of(settings: Settings) -> dict[str, str]:
    return {RAY_CLUSTER_LABEL: settings.ray.ray_cluster_name}


def _head_of(settings: Settings) -> dict[str, str]:
    return _ray_nodes_of(settings) | {RAY_NODE_TYPE_LABEL: "head"}


def _pods(namespace: str, of: dict[str, str]) -> Manifest:
    """Pods of another namespace; the API server puts the name label on every namespace."""
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "podSelector": {"matchLabels": of},
    }


def _policy(settings: Settings, name: str, spec: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": settings.ray.namespace, "labels": labels(settings)}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
