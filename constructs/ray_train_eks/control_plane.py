"""The EKS control plane: who may reach it, who may use it, what it records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aws_cdk import Duration, RemovalPolicy, Stack
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_kms as kms
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_logs as logs

from constructs import Construct
from ray_train_eks.accepted_findings import accept, managed_policy, wildcard

# How cdk-nag spells a managed policy that is attached on a condition.
_ECR_PUBLIC_POLICY = (
    'AwsSolutions-IAM4[Policy::{{"Fn::If":["{}",{{"Fn::Join":["",["arn:",{{"Ref":"AWS::Partition"}},'
    '":iam::aws:policy/AmazonElasticContainerRegistryPublicReadOnly"]]}},{{"Ref":"AWS::NoValue"}}]}}]'
)


@dataclass(frozen=True)
class Access:
    """Who reaches the Kubernetes API, and who is its administrator.

    Attributes:
        public_cidrs: address ranges that reach it from outside the VPC; none makes the endpoint private.
        admin_role_arns: IAM roles with cluster-admin rights. The role that deploys gets none by itself.
    """

    public_cidrs: Sequence[str] = ()
    admin_role_arns: Sequence[str] = ()

    @property
    def endpoint(self) -> eks.EndpointAccess:
        """EKS's form of it. Nodes and kubectl's Lambda function always use the private endpoint."""
        if not self.public_cidrs:
            return eks.EndpointAccess.PRIVATE
        return eks.EndpointAccess.PUBLIC_AND_PRIVATE.only_from(*self.public_cidrs)


class ControlPlane(Construct):
    """A cluster without nodes and without self-managed add-ons.

    Attributes:
        cluster: for node groups, charts and manifests.
    """

    def __init__(
        self,
        scope: Construct,
        id: str,
        *,
        vpc: ec2.IVpc,
        name: str,
        version: str,
        kubectl_layer: lambda_.ILayerVersion,
        access: Access,
    ) -> None:
        """Creates the cluster.

        Args:
            vpc: private subnets need a route to the internet: kubectl's Lambda function fetches charts.
            name: physical name. EKS writes its log to a group of this name, which is only ours to expire
                and to delete if it is known beforehand.
            version: Kubernetes minor version, such as 1.36.
            kubectl_layer: kubectl and helm of that version.
            access: who reaches and who administers the cluster.
        """
        super().__init__(scope, id)
        self.cluster = eks.Cluster(
            self,
            "Cluster",
            cluster_name=name,
            version=eks.KubernetesVersion.of(version),
            vpc=vpc,
            vpc_subnets=[ec2.SubnetSelection(subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS)],
            endpoint_access=access.endpoint,
            cluster_logging=list(eks.ClusterLoggingTypes),
            secrets_encryption_key=self._secrets_key(),
            bootstrap_cluster_creator_admin_permissions=False,
            bootstrap_self_managed_addons=False,
            # Auto Mode is the default of this construct; our node groups bring their own launch templates.
            default_capacity_type=eks.DefaultCapacityType.NODEGROUP,
            default_capacity=0,
            kubectl_provider_options=eks.KubectlProviderOptions(kubectl_layer=kubectl_layer),
        )
        self.cluster.node.add_dependency(self._log_group(name))
        for arn in dict.fromkeys(access.admin_role_arns):
            self._add_admin(arn)
        self._accept_findings()

    def _log_group(self, name: str) -> logs.LogGroup:
        return logs.LogGroup(
            self,
            "Logs",
            log_group_name=f"/aws/eks/{name}/cluster",
            retention=logs.RetentionDays.THREE_MONTHS,
            removal_policy=RemovalPolicy.DESTROY,
        )

    def _accept_findings(self) -> None:
        """All of them are about roles and functions that CDK's cluster construct makes itself."""
        reason = "Made by CDK's EKS construct, with AWS's policy for exactly this purpose."
        policies = (
            "AmazonEKSClusterPolicy",
            "AmazonEC2ContainerRegistryReadOnly",
            "service-role/AWSLambdaBasicExecutionRole",
            "service-role/AWSLambdaVPCAccessExecutionRole",
        )
        function = self.cluster.node.find_child("KubectlProvider").node.find_child("Handler")
        condition = Stack.of(self).get_logical_id(function.node.find_child("HasEcrPublic"))
        accept(
            self.cluster,
            {
                **{managed_policy(name): reason for name in policies},
                _ECR_PUBLIC_POLICY.format(condition): reason,
                wildcard(function.node.default_child, ":*"): "All versions of the one kubectl function.",
                "AwsSolutions-L1": "CDK chooses the runtime of its own function and tests it with it.",
            },
        )

    def _secrets_key(self) -> kms.Key:
        return kms.Key(
            self,
            "SecretsKey",
            description="Envelope encryption of Kubernetes secrets",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.DESTROY,
            pending_window=Duration.days(7),
        )

    def _add_admin(self, role_arn: str) -> None:
        policy = eks.AccessPolicy.from_access_policy_name(
            "AmazonEKSClusterAdminPolicy", access_scope_type=eks.AccessScopeType.CLUSTER
        )
        # The id is the role's, not a number: with numbers, dropping the first role of a list would give its
        # entry to the second, which still has one, and EKS allows one a role.
        id = f"Admin-{role_arn.replace('/', '-')}"
        eks.AccessEntry(self, id, cluster=self.cluster, principal=role_arn, access_policies=[policy])
