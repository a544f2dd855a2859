"""KubeRay's rules for a RayCluster, one function each. A rule yields what is wrong with the manifest."""

from __future__ import annotations

import re
from collections.abc import Iterator

from k8s.pods import Manifest
from settings import MAX_RAY_CLUSTER_NAME

# RFC 1035 label, as Kubernetes checks it; 63 is its own limit, KubeRay's are shorter.
DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")

_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")

_SIZES_IN_START_PARAMS = ("num-cpus", "num-gpus", "memory", "resources")
_UPGRADE_TYPES = ("Recreate", "None")
_TOKEN_NEEDS = (2, 52, 0)
_KUBERNETES_TOKEN_NEEDS = (2, 55, 0)
_PRIORITY_NEEDS = (2, 56, 0)
_AUTOSCALER_V2_VARIABLE = "RAY_enable_autoscaler_v2"
_FAULT_TOLERANCE_ANNOTATION = "ray.io/ft-enabled"

# Field of the spec -> the operator's feature gate that allows it; all are off by default (features.go).
_GATED_FIELDS = {
    "networkPolicy": "RayClusterNetworkPolicy",
    "tlsOptions": "RayClusterMTLS",
    "historyServerOptions": "RayClusterHistoryServer",
}


def name_is_valid(cluster: Manifest) -> Iterator[str]:
    name = cluster["metadata"]["name"]
    if len(name) > MAX_RAY_CLUSTER_NAME:
        yield f"metadata.name has {len(name)} characters; at most {MAX_RAY_CLUSTER_NAME}"
    if not DNS_1035.fullmatch(name):
        yield f"metadata.name = {name}: use lower-case letters, digits and '-', starting with a letter"


def every_group_has_a_container(cluster: Manifest) -> Iterator[str]:
    for where, group in _groups(cluster):
        if not _pod(group).get("containers"):
            yield f"{where} has no container; KubeRay starts Ray in the first one"


def kuberay_writes_the_command(cluster: Manifest) -> Iterator[str]:
    """Not refused, but appended to: a command of ours would run before `ray start`, or instead of it."""
    for where, group in _groups(cluster):
        if _ray_container(group).get("command"):
            yield f"{where} sets the container's command; leave it out, KubeRay writes `ray start`"


def sizes_are_said_once(cluster: Manifest) -> Iterator[str]:
    for where, group in _groups(cluster):
        given = [name for name in _SIZES_IN_START_PARAMS if group.get("rayStartParams", {}).get(name)]
        if given and group.get("resources"):
            yield f"{where} says {', '.join(given)} in rayStartParams and sets resources; use one of the two"


def labels_are_valid(cluster: Manifest) -> Iterator[str]:
    for where, group in _groups(cluster):
        if "labels" in group.get("rayStartParams", {}):
            yield f"{where} sets rayStartParams.labels; use the group's labels"
        for key, value in group.get("labels", {}).items():
            prefix, _, name = key.rpartition("/")
            if not _LABEL_NAME.fullmatch(name) or (prefix and not _LABEL_PREFIX.fullmatch(prefix)):
                yield f"{where}.labels has the key {key}: not a Kubernetes label key"
            if value and not _LABEL_NAME.fullmatch(value):
                yield f"{where}.labels.{key} = {value}: not a Kubernetes label value"


def replica_counts_are_consistent(cluster: Manifest) -> Iterator[str]:
    """The schema's default for maxReplicas is 2147483647, so a count that is left out is refused here."""
    for where, group in _workers(cluster):
        counts = {name: group.get(name) for name in ("minReplicas", "maxReplicas")}
        for name, count in counts.items():
            if count is None and not _autoscales(cluster):
                yield f"{where}.{name} is missing; without autoscaling both bounds are needed"
            elif count is not None and count < 0:
                yield f"{where}.{name} = {count}: must not be negative"
        low, high = counts.values()
        if low is not None and high is not None and low > high:
            yield f"{where}.minReplicas = {low}: above maxReplicas = {high}"


def upgrade_strategy_is_known(cluster: Manifest) -> Iterator[str]:
    kind = cluster["spec"].get("upgradeStrategy", {}).get("type")
    if kind is not None and kind not in _UPGRADE_TYPES:
        yield f"spec.upgradeStrategy.type = {kind}: use one of {', '.join(_UPGRADE_TYPES)}"


def token_authentication_is_possible(cluster: Manifest) -> Iterator[str]:
    options = cluster["spec"].get("authOptions", {})
    if options.get("mode") == "token":
        yield from _needs_ray(cluster, _TOKEN_NEEDS, "spec.authOptions.mode = token")
    if not options.get("enableK8sTokenAuth"):
        return
    if options.get("mode") != "token":
        yield "spec.authOptions.enableK8sTokenAuth = true: set mode to token too"
        return
    yield from _needs_ray(cluster, _KUBERNETES_TOKEN_NEEDS, "spec.authOptions.enableK8sTokenAuth = true")
    if options.get("secretName"):
        yield "spec.authOptions.secretName is set beside enableK8sTokenAuth; use one of the two"


def token_authentication_is_on(cluster: Manifest) -> Iterator[str]:
    """Ours: without it, whoever reaches the head runs code on every node. `authOptions: {}` means off."""
    if cluster["spec"].get("authOptions", {}).get("mode") != "token":
        yield "spec.authOptions.mode is not token; anyone who reaches port 8265 could run code"


def features_are_enabled(cluster: Manifest) -> Iterator[str]:
    for field, gate in _GATED_FIELDS.items():
        if field in cluster["spec"]:
            yield f"spec.{field} needs the operator's feature gate {gate}, off by default; leave it out"
    if cluster["spec"].get("gcsFaultToleranceOptions", {}).get("backend") == "rocksdb":
        gate = "GCSFaultToleranceEmbeddedStorage"
        yield f"spec.gcsFaultToleranceOptions.backend = rocksdb needs the feature gate {gate}, off by default"


def redis_is_configured_in_one_place(cluster: Manifest) -> Iterator[str]:
    head = cluster["spec"]["headGroupSpec"]
    params, variables = head.get("rayStartParams", {}), _variables(head)
    annotations = cluster["metadata"].get("annotations", {})
    options = "gcsFaultToleranceOptions"
    if "redis-username" in params or "REDIS_USERNAME" in variables:
        yield f"the head names a Redis user; set spec.{options}.redisUsername instead"
    if options not in cluster["spec"]:
        is_on = annotations.get(_FAULT_TOLERANCE_ANNOTATION, "").lower() == "true"
        if "RAY_REDIS_ADDRESS" in variables and not is_on:
            yield f"the head sets RAY_REDIS_ADDRESS; set spec.{options}.redisAddress instead"
        return
    if annotations.get(_FAULT_TOLERANCE_ANNOTATION):
        yield f"annotation {_FAULT_TOLERANCE_ANNOTATION} beside spec.{options}; use the latter alone"
    if annotations.get("ray.io/external-storage-namespace"):
        yield f"annotation ray.io/external-storage-namespace: set {options}.externalStorageNamespace instead"
    if params.get("redis-password") or variables.keys() & {"REDIS_PASSWORD", "RAY_REDIS_ADDRESS"}:
        yield f"the head holds Redis's address or password; set them in spec.{options} instead"


def redis_needs_no_storage(cluster: Manifest) -> Iterator[str]:
    options = cluster["spec"].get("gcsFaultToleranceOptions", {})
    if options.get("storage") and options.get("backend", "redis") == "redis":
        yield "spec.gcsFaultToleranceOptions.storage belongs to the backend rocksdb; leave it out"


def autoscaler_variables_fit(cluster: Manifest) -> Iterator[str]:
    version = _variables(cluster["spec"]["headGroupSpec"]).get(_AUTOSCALER_V2_VARIABLE)
    options = cluster["spec"].get("autoscalerOptions", {})
    if not _autoscales(cluster) and version in ("1", "true"):
        yield f"the head sets {_AUTOSCALER_V2_VARIABLE} = {version}; that needs enableInTreeAutoscaling"
    if _autoscales(cluster) and "version" in options and version is not None:
        yield f"spec.autoscalerOptions.version and the head's {_AUTOSCALER_V2_VARIABLE}: use the former alone"
    if "KUBERAY_GEN_AUTOSCALER_START_CMD" in [one["name"] for one in options.get("env", [])]:
        yield "spec.autoscalerOptions.env sets KUBERAY_GEN_AUTOSCALER_START_CMD, which KubeRay manages"
    if (idle_s := options.get("idleTimeoutSeconds", 0)) < 0:
        yield f"spec.autoscalerOptions.idleTimeoutSeconds = {idle_s}: must not be negative"


def autoscaler_v2_never_restarts(cluster: Manifest) -> Iterator[str]:
    if not _autoscales(cluster) or not _autoscaler_is_v2(cluster):
        return
    for where, group in _groups(cluster):
        policy = _pod(group).get("restartPolicy", "Never")
        if policy != "Never":
            yield f"{where} has restartPolicy {policy}; with autoscaler v2 use Never, or leave it out"


def suspended_groups_do_not_autoscale(cluster: Manifest) -> Iterator[str]:
    for where, group in _workers(cluster):
        if group.get("suspend") and _autoscales(cluster):
            yield f"{where}.suspend = true: not possible with autoscaling"


def worker_options_have_their_autoscaler(cluster: Manifest) -> Iterator[str]:
    for where, group in _workers(cluster):
        idle_s, priority = group.get("idleTimeoutSeconds"), group.get("priority")
        if idle_s is not None and idle_s < 0:
            yield f"{where}.idleTimeoutSeconds = {idle_s}: must not be negative"
        if priority:
            yield from _needs_ray(cluster, _PRIORITY_NEEDS, f"{where}.priority = {priority}")
        if (idle_s is not None or priority) and not _autoscaler_is_v2(cluster):
            yield f"{where} sets idleTimeoutSeconds or priority; set spec.autoscalerOptions.version to v2"


RAY_CLUSTER_RULES = (
    name_is_valid,
    every_group_has_a_container,
    kuberay_writes_the_command,
    sizes_are_said_once,
    labels_are_valid,
    replica_counts_are_consistent,
    upgrade_strategy_is_known,
    token_authentication_is_possible,
    token_authentication_is_on,
    features_are_enabled,
    redis_is_configured_in_one_place,
    redis_needs_no_storage,
    autoscaler_variables_fit,
    autoscaler_v2_never_restarts,
    suspended_groups_do_not_autoscale,
    worker_options_have_their_autoscaler,
)


def _workers(cluster: Manifest) -> list[tuple[str, Manifest]]:
    groups = cluster["spec"].get("workerGroupSpecs", [])
    return [(f"worker group {group['groupName']}", group) for group in groups]


def _groups(cluster: Manifest) -> list[tuple[str, Manifest]]:
    return [("headGroupSpec", cluster["spec"]["headGroupSpec"]), *_workers(cluster)]


def _pod(group: Manifest) -> Manifest:
    return group["template"]["spec"]


def _ray_container(group: Manifest) -> Manifest:
    return (_pod(group).get("containers") or [{}])[0]


def _variables(group: Manifest) -> dict[str, str | None]:
    return {one["name"]: one.get("value") for one in _ray_container(group).get("env", [])}


def _autoscales(cluster: Manifest) -> bool:
    return bool(cluster["spec"].get("enableInTreeAutoscaling"))


def _autoscaler_is_v2(cluster: Manifest) -> bool:
    if cluster["spec"].get("autoscalerOptions", {}).get("version") == "v2":
        return True
    return _variables(cluster["spec"]["headGroupSpec"]).get(_AUTOSCALER_V2_VARIABLE) in ("1", "true")


def _needs_ray(cluster: Manifest, least: tuple[int, int, int], what: str) -> Iterator[str]:
    given = cluster["spec"].get("rayVersion", "")
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?.*", given)
    if not found or tuple(int(part or 0) for part in found.groups()) < least:
        wanted = ".".join(map(str, least))
        yield f"spec.rayVersion = {given or '(missing)'}: {what} needs {wanted} or newer"
