"""The QoS class Kubernetes gives a pod."""

from __future__ import annotations

import re
from decimal import Decimal

from k8s.pods import Manifest

_FACTORS = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
}
_FACTORS |= {"Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40)}


def quantity(text: str) -> Decimal:
    """The number a Kubernetes quantity stands for: "500m" is 0.5, "1Gi" is 1073741824.

    Raises:
        ValueError: not a quantity in the suffixes used here (m, k, M, G, Ki, Mi, Gi, Ti).
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", text)
    if not found or found[2] not in _FACTORS:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 500m or 8Gi")
    return Decimal(found[1]) * _FACTORS[found[2]]


def qos_class(pod_spec: Manifest) -> str:
    """Guaranteed, Burstable or BestEffort, by cpu and memory of all containers, init containers included.

    Source: ComputePodQOS, pkg/apis/core/v1/helper/qos/qos.go of Kubernetes. A missing request counts as the
    limit, as the API server fills it in.
    """
    containers = [*pod_spec["containers"], *pod_spec.get("initContainers", [])]
    resources = [container.get("resources", {}) for container in containers]
    if all(_is_guaranteed(one) for one in resources):
        return "Guaranteed"
    return "Burstable" if any(_asks_for_something(one) for one in resources) else "BestEffort"


def _is_guaranteed(resources: Manifest) -> bool:
    limits = resources.get("limits", {})
    requests = limits | resources.get("requests", {})
    return all(
        name in limits and quantity(limits[name]) == quantity(requests[name]) > 0
        for name in ("cpu", "memory")
    )


def _asks_for_something(resources: Manifest) -> bool:
    amounts = [*resources.get("limits", {}).items(), *resources.get("requests", {}).items()]
    return any(name in ("cpu", "memory") and quantity(amount) > 0 for name, amount in amounts)
