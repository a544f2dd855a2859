"""KubeRay's rules for a RayJob that selects an existing RayCluster, one function each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import yaml

from k8s.pods import RAY_CLUSTER_LABEL, Manifest
from k8s.ray_cluster_rules import DNS_1035
from settings import MAX_RAY_JOB_NAME

# rayjob_types.go. The schema has no enum for them: `submissionMode: Foo` passes the API server.
_SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
# Deletion policies in the order in which they may take effect.
_DELETIONS = ("DeleteWorkers", "DeleteCluster", "DeleteSelf")
_CONDITIONS = ("jobStatus", "jobDeploymentStatus")


def name_is_valid(job: Manifest) -> Iterator[str]:
    name = job["metadata"]["name"]
    if len(name) > MAX_RAY_JOB_NAME:
        yield f"metadata.name has {len(name)} characters; at most {MAX_RAY_JOB_NAME}"
    if not DNS_1035.fullmatch(name):
        yield f"metadata.name = {name}: use lower-case letters, digits and '-', starting with a letter"


def submission_mode_is_known(job: Manifest) -> Iterator[str]:
    """An unknown mode is stored and then does nothing."""
    mode = _mode(job)
    if mode not in _SUBMISSION_MODES:
        yield f"spec.submissionMode = {mode}: use one of {', '.join(_SUBMISSION_MODES)}"


def entrypoint_is_given(job: Manifest) -> Iterator[str]:
    """No field of a RayJob is required by the schema, this one included."""
    if not job["spec"].get("entrypoint", "").strip() and _mode(job) != "InteractiveMode":
        yield "spec.entrypoint is empty; there is nothing to run"


def a_cluster_is_chosen(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if not spec.get("clusterSelector") and "rayClusterSpec" not in spec:
        yield "one of spec.clusterSelector and spec.rayClusterSpec is needed"
    if spec.get("clusterSelector") and not spec["clusterSelector"].get(RAY_CLUSTER_LABEL):
        yield f"spec.clusterSelector names no cluster; set {RAY_CLUSTER_LABEL}"


def selects_the_cluster(job: Manifest, cluster: Manifest) -> Iterator[str]:
    """A selector that matches nothing is not refused: the job waits in `Initializing` for ever."""
    there = f"{cluster['metadata']['namespace']}/{cluster['metadata']['name']}"
    selected = job["spec"].get("clusterSelector", {}).get(RAY_CLUSTER_LABEL)
    if selected and f"{job['metadata']['namespace']}/{selected}" != there:
        yield f"spec.clusterSelector = {selected}: finds no RayCluster; the app's is {there}"


def suspend_is_possible(job: Manifest) -> Iterator[str]:
    spec = job["spec"]
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        yield "spec.suspend = true: needs shutdownAfterJobFinishes"
    if spec.get("suspend") and spec.get("clusterSelector"):
        yield "spec.suspend = true: not possible on a selected cluster"


def backoff_limit_is_possible(job: Manifest) -> Iterator[str]:
    limit = job["spec"].get("backoffLimit", 0)
    if limit < 0:
        yield f"spec.backoffLimit = {limit}: must not be negative"
    if limit > 0 and job["spec"].get("clusterSelector"):
        yield f"spec.backoffLimit = {limit}: not possible on a selected cluster; use 0"
    if limit > 0 and _mode(job) == "InteractiveMode":
        yield f"spec.backoffLimit = {limit}: not possible in InteractiveMode; use 0"


def sidecar_mode_is_possible(job: Manifest) -> Iterator[str]:
    if _mode(job) != "SidecarMode":
        return
    for field in ("clusterSelector", "submitterPodTemplate", "submitterConfig"):
        if job["spec"].get(field):
            yield f"spec.submissionMode = SidecarMode: not possible with {field}; use K8sJobMode"


def submitter_may_not_restart_always(job: Manifest) -> Iterator[str]:
    """Kubernetes' own rule for the Job that KubeRay makes of the template (and Always is a pod's default)."""
    template = job["spec"].get("submitterPodTemplate")
    policy = template["spec"].get("restartPolicy", "Always") if template else "Never"
    if policy not in ("Never", "OnFailure"):
        yield f"spec.submitterPodTemplate has restartPolicy {policy}; a Job allows Never and OnFailure"


def deadlines_are_positive(job: Manifest) -> Iterator[str]:
    for field in ("activeDeadlineSeconds", "preRunningDeadlineSeconds"):
        if job["spec"].get(field, 1) <= 0:
            yield f"spec.{field} = {job['spec'][field]}: must be above 0"


def a_deadline_is_set(job: Manifest) -> Iterator[str]:
    """Ours: without a deadline a job whose cluster never comes waits for ever."""
    if "activeDeadlineSeconds" not in job["spec"]:
        yield "spec.activeDeadlineSeconds is missing; the job could wait in Initializing for ever"


def time_to_live_is_possible(job: Manifest) -> Iterator[str]:
    ttl_s = job["spec"].get("ttlSecondsAfterFinished", 0)
    if ttl_s < 0:
        yield f"spec.ttlSecondsAfterFinished = {ttl_s}: must not be negative"
    if ttl_s > 0 and not job["spec"].get("shutdownAfterJobFinishes"):
        yield f"spec.ttlSecondsAfterFinished = {ttl_s}: needs shutdownAfterJobFinishes"


def shutdown_is_possible(job: Manifest) -> Iterator[str]:
    """Not refused, but without effect: the operator never deletes a selected cluster."""
    if job["spec"].get("shutdownAfterJobFinishes") and job["spec"].get("clusterSelector"):
        yield "spec.shutdownAfterJobFinishes = true: has no effect on a selected cluster; leave it out"


def runtime_environment_parses(job: Manifest) -> Iterator[str]:
    text = job["spec"].get("runtimeEnvYAML", "")
    try:
        environment = yaml.safe_load(text)
    except yaml.YAMLError as error:
        yield f"spec.runtimeEnvYAML is not YAML: {' '.join(str(error).split())}"
        return
    if environment is not None and not isinstance(environment, dict):
        yield f"spec.runtimeEnvYAML = {text.strip()}: must be a mapping such as `working_dir: s3://...`"


def runtime_environment_survives_the_shell(job: Manifest) -> Iterator[str]:
    """K8sJobMode pastes it between double quotes, where bash still expands (common/job.go)."""
    text = re.sub(r"\$\{Token\[[^\]]*\]\}", "", job["spec"].get("runtimeEnvYAML", ""))
    if _mode(job) == "K8sJobMode" and (found := re.search(r"[$`]", text)):
        yield f"spec.runtimeEnvYAML holds {found[0]}, which the submitter's shell expands; leave it out"


def deletion_strategy_is_complete(job: Manifest) -> Iterator[str]:
    strategy = job["spec"].get("deletionStrategy")
    if strategy is None:
        return
    where = "spec.deletionStrategy"
    old = [name for name in ("onSuccess", "onFailure") if strategy.get(name)]
    rules = strategy.get("deletionRules")
    if not old and not rules:
        yield f"{where} is empty; give deletionRules, or leave it out"
    if old and rules:
        yield f"{where} has {', '.join(old)} beside deletionRules; use the latter alone"
    if rules and job["spec"].get("shutdownAfterJobFinishes"):
        yield f"{where}.deletionRules: not possible with shutdownAfterJobFinishes"
    if len(old) == 1:
        yield f"{where} has {old[0]} alone; the old form needs onSuccess and onFailure"
    for name in old:
        if not strategy[name].get("policy"):
            yield f"{where}.{name}.policy is missing"
        elif strategy[name]["policy"] == "DeleteNone" and job["spec"].get("shutdownAfterJobFinishes"):
            yield f"{where}.{name}.policy = DeleteNone: contradicts shutdownAfterJobFinishes"


def selected_clusters_are_not_deleted(job: Manifest) -> Iterator[str]:
    if not job["spec"].get("clusterSelector"):
        return
    strategy = job["spec"].get("deletionStrategy", {})
    policies = [strategy.get(name, {}).get("policy") for name in ("onSuccess", "onFailure")]
    policies += [rule.get("policy") for rule in strategy.get("deletionRules", [])]
    for policy in policies:
        if policy in ("DeleteCluster", "DeleteWorkers"):
            yield f"spec.deletionStrategy says {policy}: not possible on a selected cluster"


def deletion_rules_have_one_condition(job: Manifest) -> Iterator[str]:
    seen = set()
    for index, rule in _deletion_rules(job):
        where, condition = f"spec.deletionStrategy.deletionRules[{index}]", rule.get("condition", {})
        given = [name for name in _CONDITIONS if condition.get(name)]
        if len(given) != 1:
            yield f"{where}.condition needs exactly one of {' and '.join(_CONDITIONS)}"
            continue
        if condition.get("ttlSeconds", 0) < 0:
            yield f"{where}.condition.ttlSeconds = {condition['ttlSeconds']}: must not be negative"
        key = (condition[given[0]], rule.get("policy"))
        if key in seen:
            yield f"{where} repeats {key[1]} for {key[0]}"
        seen.add(key)


def deletion_rules_come_in_order(job: Manifest) -> Iterator[str]:
    """Workers go before the cluster, the cluster before the RayJob itself."""
    ttls_s: dict[Any, dict[str, int]] = {}
    for _, rule in _deletion_rules(job):
        condition = rule.get("condition", {})
        key = tuple(condition.get(name) for name in _CONDITIONS)
        ttls_s.setdefault(key, {})[rule.get("policy")] = condition.get("ttlSeconds", 0)
    for by_policy in ttls_s.values():
        in_order = [(policy, by_policy[policy]) for policy in _DELETIONS if policy in by_policy]
        for (first, first_s), (then, then_s) in itertools.pairwise(in_order):
            if then_s < first_s:
                yield f"spec.deletionStrategy: {then} ({then_s} s) would come before {first} ({first_s} s)"


RAY_JOB_RULES = (
    name_is_valid,
    submission_mode_is_known,
    entrypoint_is_given,
    a_cluster_is_chosen,
    suspend_is_possible,
    backoff_limit_is_possible,
    sidecar_mode_is_possible,
    submitter_may_not_restart_always,
    deadlines_are_positive,
    a_deadline_is_set,
    time_to_live_is_possible,
    shutdown_is_possible,
    runtime_environment_parses,
    runtime_environment_survives_the_shell,
    deletion_strategy_is_complete,
    selected_clusters_are_not_deleted,
    deletion_rules_have_one_condition,
    deletion_rules_come_in_order,
)


def _mode(job: Manifest) -> str:
    return job["spec"].get("submissionMode", "K8sJobMode")


def _deletion_rules(job: Manifest) -> list[tuple[int, Manifest]]:
    return list(enumerate(job["spec"].get("deletionStrategy", {}).get("deletionRules", [])))
