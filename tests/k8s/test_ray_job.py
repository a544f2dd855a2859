"""The RayJob, and above all its command line: what the training module reads is what the settings say."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess

import aws_cdk as cdk
import pytest
import yaml
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from ray.dashboard.modules.job.cli import submit

from k8s.ray_job import command, entrypoint, job_name, ray_job
from training.config import TrainingConfig, from_argv

COMMAND = ["python", "-m", "training.run"]

# Anything an argument may hold: no NUL byte, no half of a surrogate pair. Shells' own characters come often.
HOSTILE = st.text(st.sampled_from(" $'\"\\`(){}[]!*?~#&;|<>\n\t-=%aZ0")) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
)
CONFIGS = st.builds(
    TrainingConfig,
    model_id=HOSTILE.filter(bool),
    model_revision=HOSTILE,
    data=HOSTILE,
    storage_path=HOSTILE.filter(bool),
    steps=st.integers(1, 10**9),
    learning_rate=st.floats(1e-30, 1e30),
    reshard_after_forward=st.booleans(),
)


def _kubelet(text: str, environment: dict[str, str]) -> str:
    """Expands container arguments: `$(NAME)` if the container has NAME, `$$` to `$`, all else unchanged.

    Source: third_party/forked/golang/expansion/expand.go of Kubernetes.
    """

    def expand(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environment.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", expand, text)


def _shell_words(shell: list[str], command: str) -> list[str]:
    """The words a real shell makes of a command line."""
    printed = subprocess.run([*shell, f"printf '%s\\0' {command} ;"], check=True, capture_output=True)
    return printed.stdout.decode().split("\0")[:-1]


def _arrives(command: str) -> list[str]:
    """The argument vector on the head, for an entrypoint in a RayJob."""
    in_container = _kubelet(command.strip(), {"RAY_JOB_SUBMISSION_ID": "expanded", "HOME": "expanded"})
    words = _shell_words(["bash", "-ce"], in_container)
    options = ["--address", "http://llm-head-svc.ray.svc.cluster.local:8265", "--no-wait", "--"]
    submitted = shlex.join(submit.make_context("submit", [*options, *words]).params["entrypoint"])
    return _shell_words(["sh", "-c"], submitted)


@given(config=CONFIGS)
@example(config=TrainingConfig(data='$(RAY_JOB_SUBMISSION_ID) $$HOME $$(HOME) it\'s "`id`"'))
@example(config=TrainingConfig(data="--steps", model_id="-x"))
@hypothesis_settings(max_examples=120, deadline=None)
def test_the_command_line_arrives_unchanged_through_kubelet_shells_and_ray(config):
    words = _arrives(entrypoint(config))
    assert words[:3] == COMMAND
    assert from_argv(words[3:]) == config


@given(config=CONFIGS)
@hypothesis_settings(deadline=None)
def test_the_command_line_splits_as_python_splits_it(config):
    words = shlex.split(entrypoint(config))
    assert words[:3] == COMMAND
    assert from_argv(words[3:]) == config


def test_cdk_tokens_stay_whole_and_resolve_inside_the_command_line():
    stack = cdk.Stack(cdk.App(), "Test")
    bucket = cdk.CfnParameter(stack, "Bucket").value_as_string
    config = TrainingConfig(storage_path=f"s3://{bucket}/runs of $me", model_id="m")
    assert bucket in entrypoint(config)
    resolved = stack.resolve(entrypoint(config))
    before, reference, after = resolved["Fn::Join"][1]
    assert reference == {"Ref": "Bucket"}
    assert from_argv(_arrives(before + "my-bucket" + after)[3:]).storage_path == "s3://my-bucket/runs of $me"


def test_a_plain_token_needs_no_quotes(settings):
    token = "s3://${Token[TOKEN.123]}/runs"
    job = ray_job(settings, digest="a" * 10, working_dir="s3://${Token[Bucket.1]}/x.zip", storage_path=token)
    assert f"--storage-path {token}" in job["spec"]["entrypoint"]
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"]) == {"working_dir": "s3://${Token[Bucket.1]}/x.zip"}


def test_the_job_runs_what_the_settings_say_under_its_own_name(settings, job):
    config = from_argv(shlex.split(job["spec"]["entrypoint"])[3:])
    wanted = dataclasses.replace(
        settings.job, storage_path="s3://results/runs", run_name=job["metadata"]["name"]
    )
    assert config == wanted
    assert config.require_transport == "efa" and config.device == "cuda"


def test_the_job_runs_on_the_cluster_of_the_same_settings(job, cluster):
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    assert job["metadata"]["namespace"] == cluster["metadata"]["namespace"]


def test_the_deadline_is_the_settings(make_settings):
    settings = make_settings(job_deadline_s=1234)
    # KubeRay leaves a run on a selected cluster alone past the deadline: it has to end itself.
    assert from_argv(command(settings, run_name="x", storage_path="s3://b/p")[3:]).max_run_s == 1234
    job = ray_job(settings, digest="a" * 10, working_dir="s3://a/b.zip", storage_path="s3://c")
    assert job["spec"]["activeDeadlineSeconds"] == 1234


def test_another_digest_is_another_name(settings):
    assert job_name(settings, "0123456789ab") == job_name(settings, "0123456789cd") == "llm-0123456789"
    assert job_name(settings, "1123456789ab") == "llm-1123456789"


def test_the_longest_cluster_name_still_gives_a_name_kuberay_takes(make_settings):
    settings = make_settings(ray_cluster_name="c" * 36)
    assert len(job_name(settings, "a" * 64)) == 47


@pytest.mark.parametrize("digest", ["", "012345678", "XYZ3456789", "0123456789\n", "01234 6789"])
def test_a_digest_that_cannot_name_a_job_is_refused_with_its_value(settings, digest):
    with pytest.raises(ValueError, match=re.escape(repr(digest))):
        job_name(settings, digest)


def test_the_submitter_stays_off_gpu_nodes_and_is_found_by_its_label(job):
    template = job["spec"]["submitterPodTemplate"]
    assert template["spec"]["nodeSelector"] == {"ray-train/role": "system"}
    assert template["metadata"]["labels"] == {"ray-train/role": "submitter"}
    assert template["spec"]["restartPolicy"] == "Never"


def test_a_comparison_of_networks_is_a_job_like_any_other(make_settings):
    from training.compare import _parser, _problems, _split

    settings = make_settings(compare="efa-tcp", compare_repeats=5, steps=10)
    job = ray_job(settings, digest="0123456789", working_dir="s3://a/b.zip", storage_path="s3://results/runs")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "training.compare"]
    own, training = _split(words[3:])
    options = _parser().parse_args(own)
    assert (options.ab, options.repeats, options.workload) == ("efa-tcp", 5, "both")
    folder = f"s3://results/runs/{job_name(settings, '0123456789')}"
    assert (options.json, options.png) == (f"{folder}/comparison.json", f"{folder}/comparison.png")
    assert from_argv(training) == dataclasses.replace(settings.job, storage_path="s3://results/runs")
    assert _problems(options, training, ["sample", "configured"]) == []
