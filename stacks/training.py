"""Namespace, identity, network policy, RayCluster, RayJob, and where results go."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_eks as eks_l1
from aws_cdk import aws_eks_v2 as eks
from ray_train_eks.function_logs import FunctionLogs
from ray_train_eks.job_package import JobPackage, code_digest
from ray_train_eks.manifest import Manifest
from ray_train_eks.pod_role import PodRole
from ray_train_eks.results_bucket import ResultsBucket

from constructs import Construct
from k8s import operator_rules
from k8s.namespace import namespace
from k8s.network_policy import network_policies
from k8s.ray_cluster import ray_cluster
from k8s.ray_job import command, job_name, ray_job
from k8s.service_account import SERVICE_ACCOUNT_NAME, service_account
from settings import JOB_DIGEST_LENGTH, Settings, SettingsError
from stacks.app_stack import AppStack

_MODULE = Path(__file__).parents[1] / "training"


class TrainingStack(AppStack):
    """The Ray cluster, and the job if the settings ask for one."""

    def __init__(self, scope: Construct, id: str, settings: Settings, *, cluster: eks.ICluster) -> None:
        """Creates bucket, identity and Kubernetes objects.

        Args:
            settings: all of them, since the manifests are made from them; `ray.image` is what pods pull.
            cluster: where to.

        Raises:
            SettingsError: the KubeRay operator would refuse the RayCluster or the RayJob.
        """
        super().__init__(
            scope, id, settings.network, "Training: RayCluster, RayJob, identity, results bucket"
        )
        self._settings, self._cluster = settings, cluster
        self._bucket = ResultsBucket(
            self, "Results", checkpoint_days=settings.ray.checkpoint_days, keep=settings.ray.keep_bucket
        )
        # Without the run's name, which carries the digest of this, and the bucket, which changes no result.
        arguments = command(settings, run_name="", storage_path=settings.job.storage_path)
        self._digest = code_digest(_MODULE, arguments, JOB_DIGEST_LENGTH)
        self._package = JobPackage(self, "Package", module=_MODULE, digest=self._digest, arguments=arguments)
        identity = self._pod_identity()
        self._apply_in_order(identity)
        FunctionLogs(self, "FunctionLogs")
        cdk.CfnOutput(self, "ResultsPath", value=self._bucket.storage_path)

    def _pod_identity(self) -> eks_l1.CfnPodIdentityAssociation:
        role = PodRole(self, "JobRole")
        self._package.grant_read_to(role)
        self._bucket.grant_runs(role)
        if self._settings.job.data.startswith("s3://"):
            role.grant_read_object(self._settings.job.data)
        association = eks_l1.CfnPodIdentityAssociation(
            self,
            "JobIdentity",
            cluster_name=self._cluster.cluster_name,
            namespace=self._settings.ray.namespace,
            service_account=SERVICE_ACCOUNT_NAME,
            role_arn=role.role_arn,
        )
        # The role's policy is a resource of its own, and the first pod needs it at once.
        association.node.add_dependency(role.node.find_child("DefaultPolicy"))
        return association

    def _apply_in_order(self, identity: eks_l1.CfnPodIdentityAssociation) -> None:
        """Each object after the one before it; deletion goes the other way, the RayJob first.

        A RayJob or RayCluster whose operator is gone never finishes deleting (finalizers).
        """
        settings = self._settings
        cluster, job = ray_cluster(settings), self._ray_job() if settings.ray.train else None
        if problems := operator_rules.problems(cluster, job):
            raise SettingsError(problems)
        steps = [
            [self._manifest(namespace(settings))],
            [self._manifest(service_account(settings))],
            [self._manifest(policy) for policy in network_policies(settings)],
            # Pod Identity is given to pods when they are created: not before the association exists.
            [identity],
            [self._manifest(cluster)],
        ]
        if job:
            # A finished RayJob never runs again: changed code or arguments are a new name.
            steps.append([self._manifest(job)])
            cdk.CfnOutput(self, "RayJobName", value=job_name(settings, self._digest))
        for earlier, later in itertools.pairwise(steps):
            for each in later:
                each.node.add_dependency(*earlier)

    def _ray_job(self) -> dict[str, Any]:
        return ray_job(
            self._settings,
            digest=self._digest,
            working_dir=self._package.url,
            storage_path=self._bucket.storage_path,
        )

    def _manifest(self, object: dict[str, Any]) -> Manifest:
        return Manifest(self, cluster=self._cluster, object=object)
