"""The RayJob: the training module's command line, submitted from inside the cluster."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Sequence

import yaml

from k8s.pods import (
    NO_GPU,
    RAY_CLUSTER_LABEL,
    SYSTEM_NODE_LABELS,
    Manifest,
    container_security,
    env,
    guaranteed,
    labels,
)
from settings import JOB_DIGEST_LENGTH, Settings
from training.config import TrainingConfig, to_argv

# The submitter only talks to the job server and prints the log. A system node's room for it is reserved in
# ray_train_eks.instance_types.SYSTEM_PODS.
SUBMITTER_RESOURCES = {"cpu": "500m", "memory": "1Gi"}
SUBMITTER_LABELS = {"ray-train/role": "submitter"}

# A CDK token inside a string, as aws_cdk.Token.as_string writes it. CloudFormation puts the value in later.
_TOKEN = re.compile(r"(\$\{Token\[[a-zA-Z0-9:._-]*\]\})")


def job_name(settings: Settings, digest: str) -> str:
    """Name of the RayJob and of its run: a finished RayJob never runs again, so new work is a new name.

    Args:
        digest: hexadecimal digest of what the job runs: code and arguments.

    Raises:
        ValueError: the digest is not hexadecimal, or too short to tell runs apart.
    """
    if not re.fullmatch(rf"[0-9a-f]{{{JOB_DIGEST_LENGTH},}}", digest):
        raise ValueError(f"digest = {digest!r}: use at least {JOB_DIGEST_LENGTH} hexadecimal digits")
    return f"{settings.ray.ray_cluster_name}-{digest[:JOB_DIGEST_LENGTH]}"


def ray_job(settings: Settings, *, digest: str, working_dir: str, storage_path: str) -> Manifest:
    """The RayJob (ray.io/v1, KubeRay 1.7) on the RayCluster of the same settings.

    Args:
        digest: hexadecimal digest of the job's code and arguments.
        working_dir: s3:// address of the zip with the training module; may hold CDK tokens.
        storage_path: s3:// prefix for results and checkpoints; may hold CDK tokens.
    """
    name = job_name(settings, digest)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "namespace": settings.ray.namespace, "labels": labels(settings)},
        "spec": {
            "clusterSelector": {RAY_CLUSTER_LABEL: settings.ray.ray_cluster_name},
            "submissionMode": "K8sJobMode",
            "entrypoint": shell_line(command(settings, run_name=name, storage_path=storage_path)),
            "runtimeEnvYAML": yaml.safe_dump({"working_dir": working_dir}),
            # Counts from the start, waiting for the RayCluster included; without it, a cluster that never
            # comes leaves the job in `Initializing` for ever. Past it KubeRay calls the job failed but does
            # not stop it on a selected cluster: the run ends itself, once it has taken as long (--max-run-s).
            "activeDeadlineSeconds": settings.ray.job_deadline_s,
            "submitterPodTemplate": _submitter(settings),
        },
    }


def _submitter(settings: Settings) -> Manifest:
    """KubeRay's own submitter is Burstable and may land on any node, where it pulls an image of many GB."""
    return {
        "metadata": {"labels": dict(SUBMITTER_LABELS)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "nodeSelector": dict(SYSTEM_NODE_LABELS),
            "containers": [
                {
                    "name": "ray-job-submitter",
                    "image": settings.ray.image,
                    "env": env(NO_GPU),
                    "resources": guaranteed(SUBMITTER_RESOURCES),
                    "securityContext": container_security(),
                }
            ],
        },
    }


def command(settings: Settings, *, run_name: str, storage_path: str) -> list[str]:
    """The words of the job's command line: one training run, or a comparison of several.

    Args:
        run_name: of the run, and of the folder that results go to.
        storage_path: s3:// prefix for results; may hold CDK tokens.
    """
    compare = settings.ray.compare
    if not compare:
        return _train(dataclasses.replace(settings.job, storage_path=storage_path, run_name=run_name))
    results = f"{storage_path}/{run_name}/comparison"
    options = ["--ab", compare, "--repeats", str(settings.ray.compare_repeats)]
    files = ["--json", f"{results}.json", "--png", f"{results}.png"]
    # Each of its runs gets a name of its own.
    job = to_argv(dataclasses.replace(settings.job, storage_path=storage_path))
    return ["python", "-m", "training.compare", *options, *files, "--", *job]


def _train(config: TrainingConfig) -> list[str]:
    return ["python", "-m", "training.run", *to_argv(config)]


def entrypoint(config: TrainingConfig) -> str:
    """The command line of one training run; see `shell_line`."""
    return shell_line(_train(config))


def shell_line(words: Sequence[str]) -> str:
    """Words as one line that is safe to paste unquoted into a shell, as KubeRay's K8sJobMode does.

    The text passes three readers: the kubelet expands `$(NAME)` and `$$` in container arguments, bash splits
    and expands words, and `ray job submit` joins them again for the shell on the head (with shlex.join). What
    reaches Python is exactly `words`.
    """
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    """One shell word, in which CDK tokens stay whole.

    A `$` ends its quotes (`$''`), so that the kubelet never sees `$(` or `$$`; inside single quotes bash
    expands nothing. A token's value is a bucket or key name of our own: it holds no quote character.
    """
    parts = _TOKEN.split(word)  # text, token, text, ..., text
    texts = parts[::2]
    if word and all(text == "" or shlex.quote(text) == text for text in texts):
        return word
    parts[::2] = [text.replace("'", "'\"'\"'").replace("$", "$''") for text in texts]
    return "'" + "".join(parts) + "'"
