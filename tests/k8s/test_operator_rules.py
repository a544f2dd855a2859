"""Each rule of the operator refuses what it should, and nothing that this app renders."""

from __future__ import annotations

import copy

import pytest

from k8s import operator_rules, ray_cluster_rules, ray_job_rules
from k8s.ray_cluster import ray_cluster
from k8s.ray_cluster_rules import RAY_CLUSTER_RULES
from k8s.ray_job import ray_job
from k8s.ray_job_rules import RAY_JOB_RULES

GONE = object()
HEAD, WORKERS = "spec.headGroupSpec", "spec.workerGroupSpecs.0"
HEAD_POD, WORKER_POD = f"{HEAD}.template.spec", f"{WORKERS}.template.spec"
FAULT_TOLERANCE, STRATEGY = "spec.gcsFaultToleranceOptions", "spec.deletionStrategy"
AUTOSCALES, OWN_CLUSTER = ("spec.enableInTreeAutoscaling", True), ("spec.clusterSelector", GONE)
V2, V2_VARIABLE = ("spec.autoscalerOptions", {"version": "v2"}), "RAY_enable_autoscaler_v2"


def head_env(name, value="x"):
    return (f"{HEAD_POD}.containers.0.env", [{"name": name, "value": value}])


def after(ttl_s, policy, **condition):
    return {"policy": policy, "condition": {"ttlSeconds": ttl_s, **(condition or {"jobStatus": "FAILED"})}}


def rules(*of):
    return (STRATEGY, {"deletionRules": list(of)})


def old(on_success, on_failure="DeleteSelf"):
    return (STRATEGY, {"onSuccess": {"policy": on_success}, "onFailure": {"policy": on_failure}})


# Rule -> changes that break it (each a list of field and value), with a word of the message.
CLUSTER_CASES = {
    ray_cluster_rules.name_is_valid: [
        ([("metadata.name", "c" * 54)], "54 characters; at most 53"),
        ([("metadata.name", "1st")], "metadata.name = 1st"),
        ([("metadata.name", "Llm")], "lower-case"),
    ],
    ray_cluster_rules.every_group_has_a_container: [
        ([(f"{HEAD_POD}.containers", [])], "headGroupSpec has no container"),
        ([(f"{WORKER_POD}.containers", [])], "worker group gpu has no container"),
    ],
    ray_cluster_rules.kuberay_writes_the_command: [
        (
            [(f"{WORKER_POD}.containers.0.command", ["sleep"])],
            "worker group gpu sets the container's command",
        ),
    ],
    ray_cluster_rules.sizes_are_said_once: [
        ([(f"{HEAD}.resources", {"CPU": "0"})], "num-cpus in rayStartParams"),
        (
            [(f"{WORKERS}.rayStartParams", {"num-gpus": "4"}), (f"{WORKERS}.resources", {"GPU": "4"})],
            "num-gpus",
        ),
    ],
    ray_cluster_rules.labels_are_valid: [
        ([(f"{HEAD}.rayStartParams.labels", "a=b")], "rayStartParams.labels"),
        ([(f"{WORKERS}.labels", {"-bad": "x"})], "key -bad"),
        ([(f"{WORKERS}.labels", {"UPPER.case/x": "x"})], "key UPPER.case/x"),
        ([(f"{WORKERS}.labels", {"zone": "no spaces"})], "zone = no spaces"),
        ([(f"{WORKERS}.labels", {"zone": "x" * 64})], "not a Kubernetes label value"),
    ],
    ray_cluster_rules.replica_counts_are_consistent: [
        ([(f"{WORKERS}.maxReplicas", GONE)], "maxReplicas is missing"),
        ([(f"{WORKERS}.minReplicas", GONE)], "minReplicas is missing"),
        ([(f"{WORKERS}.minReplicas", -1)], "minReplicas = -1"),
        ([(f"{WORKERS}.maxReplicas", -1)], "maxReplicas = -1"),
        ([(f"{WORKERS}.minReplicas", 3)], "minReplicas = 3: above maxReplicas = 2"),
    ],
    ray_cluster_rules.upgrade_strategy_is_known: [
        ([("spec.upgradeStrategy.type", "NewCluster")], "type = NewCluster"),
    ],
    ray_cluster_rules.token_authentication_is_possible: [
        ([("spec.rayVersion", GONE)], "rayVersion = (missing)"),
        ([("spec.rayVersion", "2.51.9")], "2.52.0 or newer"),
        ([("spec.rayVersion", "nightly")], "rayVersion = nightly"),
        ([("spec.authOptions", {"enableK8sTokenAuth": True})], "set mode to token"),
        (
            [("spec.authOptions.enableK8sTokenAuth", True), ("spec.rayVersion", "2.54.1")],
            "2.55.0 or newer",
        ),
        (
            [("spec.authOptions.enableK8sTokenAuth", True), ("spec.authOptions.secretName", "mine")],
            "secretName",
        ),
    ],
    ray_cluster_rules.token_authentication_is_on: [
        ([("spec.authOptions", {})], "authOptions.mode is not token"),
        ([("spec.authOptions", GONE)], "authOptions.mode is not token"),
    ],
    ray_cluster_rules.features_are_enabled: [
        ([("spec.networkPolicy", {"mode": "DenyAll"})], "RayClusterNetworkPolicy"),
        ([("spec.tlsOptions", {"enabled": True})], "RayClusterMTLS"),
        ([("spec.historyServerOptions", {})], "RayClusterHistoryServer"),
        ([(FAULT_TOLERANCE, {"backend": "rocksdb"})], "GCSFaultToleranceEmbeddedStorage"),
    ],
    ray_cluster_rules.redis_is_configured_in_one_place: [
        ([head_env("RAY_REDIS_ADDRESS")], "redisAddress"),
        ([(f"{HEAD}.rayStartParams.redis-username", "me")], "redisUsername"),
        ([head_env("REDIS_USERNAME")], "redisUsername"),
        ([(FAULT_TOLERANCE, {}), head_env("REDIS_PASSWORD")], "address or password"),
        ([(FAULT_TOLERANCE, {}), head_env("RAY_REDIS_ADDRESS")], "address or password"),
        ([(FAULT_TOLERANCE, {}), (f"{HEAD}.rayStartParams.redis-password", "x")], "address or password"),
        (
            [(FAULT_TOLERANCE, {}), ("metadata.annotations", {"ray.io/ft-enabled": "true"})],
            "annotation ray.io/ft-enabled",
        ),
        (
            [
                (FAULT_TOLERANCE, {}),
                ("metadata.annotations", {"ray.io/external-storage-namespace": "x"}),
            ],
            "externalStorageNamespace",
        ),
    ],
    ray_cluster_rules.redis_needs_no_storage: [
        ([(FAULT_TOLERANCE, {"storage": {"size": "1Gi"}})], "storage belongs to the backend rocksdb"),
    ],
    ray_cluster_rules.autoscaler_variables_fit: [
        ([head_env(V2_VARIABLE, "1")], "needs enableInTreeAutoscaling"),
        ([AUTOSCALES, V2, head_env(V2_VARIABLE, "1")], "use the former alone"),
        (
            [("spec.autoscalerOptions", {"env": [{"name": "KUBERAY_GEN_AUTOSCALER_START_CMD"}]})],
            "KubeRay manages",
        ),
        ([("spec.autoscalerOptions", {"idleTimeoutSeconds": -1})], "idleTimeoutSeconds = -1"),
    ],
    ray_cluster_rules.autoscaler_v2_never_restarts: [
        ([AUTOSCALES, V2, (f"{HEAD_POD}.restartPolicy", "Always")], "headGroupSpec has restartPolicy Always"),
        ([AUTOSCALES, V2, (f"{WORKER_POD}.restartPolicy", "OnFailure")], "gpu has restartPolicy OnFailure"),
    ],
    ray_cluster_rules.suspended_groups_do_not_autoscale: [
        ([AUTOSCALES, (f"{WORKERS}.suspend", True)], "suspend = true"),
    ],
    ray_cluster_rules.worker_options_have_their_autoscaler: [
        ([(f"{WORKERS}.idleTimeoutSeconds", 60)], "version to v2"),
        ([(f"{WORKERS}.idleTimeoutSeconds", -1), V2], "idleTimeoutSeconds = -1"),
        ([(f"{WORKERS}.priority", 1)], "version to v2"),
        ([(f"{WORKERS}.priority", 1), V2, ("spec.rayVersion", "2.55.0")], "2.56.0 or newer"),
    ],
}

JOB_CASES = {
    ray_job_rules.name_is_valid: [
        ([("metadata.name", "j" * 48)], "48 characters; at most 47"),
        ([("metadata.name", "a_b")], "metadata.name = a_b"),
    ],
    ray_job_rules.submission_mode_is_known: [([("spec.submissionMode", "Foo")], "submissionMode = Foo")],
    ray_job_rules.entrypoint_is_given: [
        ([("spec.entrypoint", GONE)], "entrypoint is empty"),
        ([("spec.entrypoint", "  ")], "entrypoint is empty"),
    ],
    ray_job_rules.a_cluster_is_chosen: [
        ([OWN_CLUSTER], "clusterSelector and spec.rayClusterSpec"),
        ([("spec.clusterSelector", {"other": "x"})], "names no cluster"),
        ([("spec.clusterSelector", {"ray.io/cluster": ""})], "names no cluster"),
    ],
    ray_job_rules.suspend_is_possible: [
        ([("spec.suspend", True)], "not possible on a selected cluster"),
        ([("spec.suspend", True), OWN_CLUSTER], "needs shutdownAfterJobFinishes"),
    ],
    ray_job_rules.backoff_limit_is_possible: [
        ([("spec.backoffLimit", 1)], "backoffLimit = 1: not possible on a selected cluster"),
        ([("spec.backoffLimit", -1)], "backoffLimit = -1"),
        ([("spec.backoffLimit", 1), ("spec.submissionMode", "InteractiveMode")], "InteractiveMode"),
    ],
    ray_job_rules.sidecar_mode_is_possible: [
        ([("spec.submissionMode", "SidecarMode")], "clusterSelector"),
        ([("spec.submissionMode", "SidecarMode")], "submitterPodTemplate"),
        (
            [("spec.submissionMode", "SidecarMode"), ("spec.submitterConfig", {"backoffLimit": 1})],
            "submitterConfig",
        ),
    ],
    ray_job_rules.submitter_may_not_restart_always: [
        ([("spec.submitterPodTemplate.spec.restartPolicy", GONE)], "restartPolicy Always"),
    ],
    ray_job_rules.deadlines_are_positive: [
        ([("spec.activeDeadlineSeconds", 0)], "activeDeadlineSeconds = 0"),
        ([("spec.preRunningDeadlineSeconds", -5)], "preRunningDeadlineSeconds = -5"),
    ],
    ray_job_rules.a_deadline_is_set: [
        ([("spec.activeDeadlineSeconds", GONE)], "activeDeadlineSeconds is missing"),
    ],
    ray_job_rules.time_to_live_is_possible: [
        ([("spec.ttlSecondsAfterFinished", 60)], "needs shutdownAfterJobFinishes"),
        ([("spec.ttlSecondsAfterFinished", -1)], "must not be negative"),
    ],
    ray_job_rules.shutdown_is_possible: [
        ([("spec.shutdownAfterJobFinishes", True)], "no effect on a selected cluster"),
    ],
    ray_job_rules.runtime_environment_parses: [
        ([("spec.runtimeEnvYAML", "a: [")], "is not YAML"),
        ([("spec.runtimeEnvYAML", "s3://bucket/key.zip")], "must be a mapping"),
    ],
    ray_job_rules.runtime_environment_survives_the_shell: [
        ([("spec.runtimeEnvYAML", "env_vars: {PRICE: $5}")], "holds $"),
        ([("spec.runtimeEnvYAML", "working_dir: s3://`id`/a.zip")], "holds `"),
    ],
    ray_job_rules.deletion_strategy_is_complete: [
        ([(STRATEGY, {})], "is empty"),
        ([(STRATEGY, {"onSuccess": {"policy": "DeleteSelf"}})], "onSuccess alone"),
        ([(STRATEGY, {"onSuccess": {"x": 1}, "onFailure": {"policy": "DeleteSelf"}})], "policy is missing"),
        (
            [(STRATEGY, old("DeleteSelf")[1] | rules(after(1, "DeleteSelf"))[1])],
            "beside deletionRules",
        ),
        ([rules(after(1, "DeleteSelf")), ("spec.shutdownAfterJobFinishes", True)], "not possible with"),
        ([old("DeleteNone"), ("spec.shutdownAfterJobFinishes", True)], "contradicts"),
    ],
    ray_job_rules.selected_clusters_are_not_deleted: [
        ([old("DeleteCluster")], "DeleteCluster: not possible"),
        ([old("DeleteSelf", "DeleteWorkers")], "DeleteWorkers: not possible"),
        ([rules(after(1, "DeleteWorkers"))], "DeleteWorkers: not possible"),
    ],
    ray_job_rules.deletion_rules_have_one_condition: [
        ([rules({"policy": "DeleteSelf", "condition": {}})], "exactly one of"),
        (
            [rules(after(1, "DeleteSelf", jobStatus="FAILED", jobDeploymentStatus="Failed"))],
            "exactly one of",
        ),
        ([rules(after(-1, "DeleteSelf"))], "ttlSeconds = -1"),
        ([rules(after(1, "DeleteSelf"), after(2, "DeleteSelf"))], "deletionRules[1] repeats DeleteSelf"),
    ],
    ray_job_rules.deletion_rules_come_in_order: [
        ([rules(after(9, "DeleteCluster"), after(1, "DeleteSelf"))], "DeleteSelf (1 s) would come before"),
        ([rules(after(9, "DeleteWorkers"), after(1, "DeleteCluster"))], "would come before DeleteWorkers"),
    ],
}


def broken(manifest, changes):
    manifest = copy.deepcopy(manifest)
    for path, value in changes:
        *parents, last = path.split(".")
        target = manifest
        for step in parents:
            target = target[int(step)] if isinstance(target, list) else target.setdefault(step, {})
        if value is GONE:
            del target[last]
        else:
            target[last] = value
    return manifest


def cases(of):
    return [
        pytest.param(rule, changes, wanted, id=f"{rule.__name__}-{index}")
        for rule, its_cases in of.items()
        for index, (changes, wanted) in enumerate(its_cases)
    ]


@pytest.mark.parametrize(("rule", "changes", "wanted"), cases(CLUSTER_CASES))
def test_a_ray_cluster_that_breaks_a_rule_is_refused(cluster, job, rule, changes, wanted):
    changed = broken(cluster, changes)
    assert list(rule(cluster)) == []
    assert any(wanted in problem for problem in rule(changed))
    named = [one for one in operator_rules.problems(changed, job) if one.startswith("RayCluster ")]
    assert any(wanted in problem for problem in named)


@pytest.mark.parametrize(("rule", "changes", "wanted"), cases(JOB_CASES))
def test_a_ray_job_that_breaks_a_rule_is_refused(cluster, job, rule, changes, wanted):
    changed = broken(job, changes)
    assert list(rule(job)) == []
    assert any(wanted in problem for problem in rule(changed))
    named = [one for one in operator_rules.problems(cluster, changed) if one.startswith("RayJob ")]
    assert any(wanted in problem for problem in named)


def test_every_rule_has_a_case_and_is_in_force():
    assert list(CLUSTER_CASES) == list(RAY_CLUSTER_RULES)
    assert list(JOB_CASES) == list(RAY_JOB_RULES)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_gpu_nodes": 1},
        {"gpu_instance_type": "p5.48xlarge"},
        {"ray_cluster_name": "c" * 36},
        {"ray_version": "2.52.0"},
        {"job_deadline_s": 60},
        {"data": "s3://corpus/it's $(here) & `there`", "model_id": "a b"},
    ],
)
def test_what_settings_allow_the_operator_takes(make_settings, changes):
    settings = make_settings(**changes)
    job = ray_job(settings, digest="a" * 10, working_dir="s3://${Token[B.1]}/x.zip", storage_path="s3://b/c")
    assert operator_rules.problems(ray_cluster(settings), job) == []
    assert operator_rules.problems(ray_cluster(settings), None) == []


def test_valid_uses_of_optional_features_are_not_refused(cluster, job):
    changes = [
        AUTOSCALES,
        V2,
        (f"{WORKERS}.idleTimeoutSeconds", 60),
        (f"{WORKERS}.priority", 1),
        (f"{WORKERS}.maxReplicas", GONE),
        (f"{WORKERS}.labels", {"ray.io/zone": "us-east-2a", "empty": ""}),
        (FAULT_TOLERANCE, {"redisAddress": "redis:6379"}),
        ("spec.upgradeStrategy", GONE),
    ]
    assert operator_rules.problems(broken(cluster, changes), job) == []


def test_valid_deletion_rules_are_not_refused(cluster, job):
    changes = [rules(after(5, "DeleteSelf"), after(5, "DeleteSelf", jobDeploymentStatus="Failed"))]
    assert operator_rules.problems(cluster, broken(job, changes)) == []


@pytest.mark.parametrize("field", ["metadata.name", "metadata.namespace"])
def test_a_job_that_selects_another_cluster_is_refused(cluster, job, field):
    moved = broken(cluster, [(field, "elsewhere")])
    assert any("finds no RayCluster" in problem for problem in operator_rules.problems(moved, job))


@pytest.mark.parametrize(
    ("which", "path"),
    [
        ("cluster", f"{HEAD_POD}.containers.0.resources.requests.memory"),
        ("cluster", f"{WORKER_POD}.containers.0.resources.limits.cpu"),
        ("job", "spec.submitterPodTemplate.spec.containers.0.resources.requests.cpu"),
    ],
)
def test_a_pod_that_is_not_guaranteed_is_refused(cluster, job, which, path):
    change = [(path, "7")] if "requests" in path else [(path, GONE)]
    given = {"cluster": cluster, "job": job}
    given[which] = broken(given[which], change)
    (problem,) = operator_rules.problems(given["cluster"], given["job"])
    assert "QoS class Burstable" in problem


def test_kuberays_own_submitter_is_refused(cluster, job):
    (problem,) = operator_rules.problems(cluster, broken(job, [("spec.submitterPodTemplate", GONE)]))
    assert problem.startswith("submitter pod: QoS class Burstable")


def test_an_init_container_without_resources_is_refused(cluster, job):
    changed = broken(cluster, [(f"{WORKER_POD}.initContainers", [{"name": "warm-up"}])])
    (problem,) = operator_rules.problems(changed, job)
    assert "worker pod of group gpu" in problem


def test_check_says_everything_at_once(cluster, job):
    cluster = broken(cluster, [("metadata.name", "Llm"), (f"{WORKERS}.minReplicas", 9)])
    job = broken(job, [("spec.backoffLimit", 3)])
    with pytest.raises(ValueError) as refusal:
        operator_rules.check(cluster, job)
    assert len(str(refusal.value).splitlines()) == 4  # the job's selector no longer finds the cluster either


def test_check_is_silent_about_what_is_right(cluster, job):
    operator_rules.check(cluster, job)
