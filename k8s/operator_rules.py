"""What KubeRay 1.7 refuses although every schema accepts it, checked before anything is deployed.

The operator validates a RayCluster or RayJob only after the API server has stored it: the deployment
succeeds, and the refusal is an event or a status that nobody watches. Source of every rule, unless it says
otherwise: ray-operator/controllers/ray/utils/validation.go at v1.7.0. Rules of fields that a disabled feature
gate refuses anyway (TLS, history server, network policy, embedded storage) are not repeated beneath it, nor
those of a `rayClusterSpec` inside a RayJob: the jobs of this app select a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from k8s import injected
from k8s.pods import Manifest
from k8s.qos import qos_class
from k8s.ray_cluster_rules import RAY_CLUSTER_RULES
from k8s.ray_job_rules import RAY_JOB_RULES, selects_the_cluster

Rule = Callable[[Manifest], Iterator[str]]


def problems(ray_cluster: Manifest, ray_job: Manifest | None) -> list[str]:
    """Everything the operator would refuse, one sentence each: object, field, value, what would be right.

    Args:
        ray_cluster: a RayCluster.
        ray_job: a RayJob on that cluster; None when the app has none.
    """
    found = _named(ray_cluster, _all(RAY_CLUSTER_RULES, ray_cluster))
    if ray_job is not None:
        found += _named(ray_job, _all(RAY_JOB_RULES, ray_job))
        found += _named(ray_job, selects_the_cluster(ray_job, ray_cluster))
    if found:  # pods of a refused object never exist
        return found
    return list(pods_are_guaranteed(ray_cluster, ray_job))


def check(ray_cluster: Manifest, ray_job: Manifest | None) -> None:
    """Refuses manifests that the operator would refuse.

    Raises:
        ValueError: with every problem, one a line.
    """
    if found := problems(ray_cluster, ray_job):
        raise ValueError("\n".join(found))


def pods_are_guaranteed(ray_cluster: Manifest, ray_job: Manifest | None) -> Iterator[str]:
    """Ours, not the operator's: a pod of another QoS class is evicted first and may be throttled."""
    pods = [("head pod", injected.head_pod(ray_cluster))]
    pods += [(f"worker pod of group {name}", pod) for name, pod in injected.worker_pods(ray_cluster).items()]
    if ray_job is not None:
        pods.append(("submitter pod", injected.submitter_pod(ray_job, ray_cluster)))
    for name, pod in pods:
        if (found := qos_class(pod)) != "Guaranteed":
            yield f"{name}: QoS class {found}; every container needs cpu and memory, limits equal to requests"


def _all(rules: tuple[Rule, ...], manifest: Manifest) -> Iterator[str]:
    for rule in rules:
        yield from rule(manifest)


def _named(manifest: Manifest, found: Iterator[str]) -> list[str]:
    return [f"{manifest['kind']} {manifest['metadata']['name']}: {problem}" for problem in found]
