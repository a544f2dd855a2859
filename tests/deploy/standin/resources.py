"""The resource types of our templates that moto's CloudFormation does not know.

Clusters and node groups live in moto's EKS backend. What moto has no place for (access entries, add-ons, Pod
Identity associations, placement groups) is kept in `KEPT`, where `api` finds it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, ClassVar

from moto.core.common_models import CloudFormationModel
from moto.ec2.models import ec2_backends
from moto.eks.models import eks_backends

# Type -> physical id -> properties.
KEPT: defaultdict[str, dict[str, dict[str, Any]]] = defaultdict(dict)


def lower_first(value: Any) -> Any:
    """CloudFormation's property names as EKS's own API spells them: SubnetIds -> subnetIds."""
    if isinstance(value, dict):
        return {key[0].lower() + key[1:]: lower_first(item) for key, item in value.items()}
    return [lower_first(item) for item in value] if isinstance(value, list) else value


class _Resource(CloudFormationModel):
    """A resource with an id, attributes for Fn::GetAtt, and nothing in moto behind it."""

    TYPE: ClassVar[str] = ""
    NAME: ClassVar[str] = ""

    def __init__(self, physical_id: str, attributes: dict[str, str] | None = None) -> None:
        self._physical_id = physical_id
        self._attributes = attributes or {}

    @property
    def physical_resource_id(self) -> str:
        return self._physical_id

    @classmethod
    def cloudformation_type(cls) -> str:  # type: ignore[override]
        return cls.TYPE

    @classmethod
    def cloudformation_name_type(cls) -> str:  # type: ignore[override]
        return cls.NAME

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return True

    def get_cfn_attribute(self, attribute_name: str) -> str:
        return self._attributes[attribute_name]

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, resource: dict[str, Any], account_id: str, region: str, **_: Any
    ) -> _Resource:
        KEPT[cls.TYPE][name] = resource["Properties"]
        return cls(name, {"Arn": f"arn:aws:standin:{region}:{account_id}:{name}"})

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: _Resource,
        new_resource_name: str,
        cloudformation_json: dict[str, Any],
        **_: Any,
    ) -> _Resource:
        KEPT[cls.TYPE][original_resource.physical_resource_id] = cloudformation_json["Properties"]
        return original_resource

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, resource: dict[str, Any], account_id: str, region: str
    ) -> None:
        KEPT[cls.TYPE].pop(resource_name)


class AccessEntry(_Resource):
    TYPE = "AWS::EKS::AccessEntry"


class Addon(_Resource):
    TYPE = "AWS::EKS::Addon"


class PodIdentityAssociation(_Resource):
    TYPE = "AWS::EKS::PodIdentityAssociation"


class PlacementGroup(_Resource):
    TYPE = "AWS::EC2::PlacementGroup"


class Cluster(_Resource):
    TYPE = "AWS::EKS::Cluster"
    NAME = "Name"

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, resource: dict[str, Any], account_id: str, region: str, **_: Any
    ) -> Cluster:
        wanted = resource["Properties"]
        vpc_config = wanted["ResourcesVpcConfig"]
        ec2 = ec2_backends[account_id][region]
        vpc_id = ec2.get_subnet(vpc_config["SubnetIds"][0]).vpc_id
        group = ec2.create_security_group(f"eks-cluster-sg-{name}", "Made by EKS", vpc_id=vpc_id)
        cluster = eks_backends[account_id][region].create_cluster(
            name,
            wanted["RoleArn"],
            lower_first(vpc_config),
            wanted["Version"],
            logging=_logging(wanted["Logging"]),
            encryption_config=lower_first(wanted["EncryptionConfig"]),
        )
        attributes = {
            "Arn": cluster.arn,
            "CertificateAuthorityData": "c3RhbmRpbg==",
            "ClusterSecurityGroupId": group.id,
            "Endpoint": cluster.endpoint,
            "OpenIdConnectIssuerUrl": "https://oidc.standin.invalid/id",
        }
        return cls(name, attributes)

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, resource: dict[str, Any], account_id: str, region: str
    ) -> None:
        eks_backends[account_id][region].delete_cluster(resource_name)
        ec2 = ec2_backends[account_id][region]
        group = ec2.get_security_group_by_name_or_id(f"eks-cluster-sg-{resource_name}")
        ec2.delete_security_group(group_id=group.id)


def _logging(wanted: dict[str, Any]) -> dict[str, Any]:
    types = [row["Type"] for row in wanted["ClusterLogging"]["EnabledTypes"]]
    return {"clusterLogging": [{"types": types, "enabled": True}]}


class Nodegroup(_Resource):
    TYPE = "AWS::EKS::Nodegroup"

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, resource: dict[str, Any], account_id: str, region: str, **_: Any
    ) -> Nodegroup:
        wanted = resource["Properties"]
        group = eks_backends[account_id][region].create_nodegroup(
            wanted["ClusterName"],
            wanted["NodeRole"],
            name,
            wanted["Subnets"],
            lower_first(wanted["ScalingConfig"]),
            instance_types=wanted.get("InstanceTypes"),
            ami_type=wanted["AmiType"],
            labels=wanted["Labels"],
            taints=lower_first(wanted.get("Taints", [])),
            launch_template=lower_first(wanted["LaunchTemplate"]),
            capacity_type=wanted.get("CapacityType"),
        )
        group.update_config = lower_first(wanted.get("UpdateConfig"))
        group.node_repair_config = lower_first(wanted.get("NodeRepairConfig"))
        return cls(f"{wanted['ClusterName']}/{name}", {"NodegroupName": name})

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, resource: dict[str, Any], account_id: str, region: str
    ) -> None:
        eks_backends[account_id][region].delete_nodegroup(*resource_name.split("/"))


class SecurityGroupEgress(_Resource):
    TYPE = "AWS::EC2::SecurityGroupEgress"

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, resource: dict[str, Any], account_id: str, region: str, **_: Any
    ) -> SecurityGroupEgress:
        wanted = resource["Properties"]
        ec2_backends[account_id][region].authorize_security_group_egress(
            wanted["GroupId"],
            wanted["IpProtocol"],
            wanted.get("FromPort"),
            wanted.get("ToPort"),
            [],
            source_groups=[{"GroupId": wanted["DestinationSecurityGroupId"]}],
        )
        return cls(name)

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, resource: dict[str, Any], account_id: str, region: str
    ) -> None:
        """The rule goes with its group."""


class SubnetRouteTableAssociation(_Resource):
    """moto's own is a note that no route table knows of."""

    TYPE = "AWS::EC2::SubnetRouteTableAssociation"

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, resource: dict[str, Any], account_id: str, region: str, **_: Any
    ) -> SubnetRouteTableAssociation:
        wanted = resource["Properties"]
        ec2 = ec2_backends[account_id][region]
        return cls(ec2.associate_route_table(wanted["RouteTableId"], subnet_id=wanted["SubnetId"]))

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, resource: dict[str, Any], account_id: str, region: str
    ) -> None:
        ec2_backends[account_id][region].disassociate_route_table(resource_name)


class BucketPolicy(_Resource):
    """Not given to moto, which would enforce the denial of plain HTTP without looking at its condition."""

    TYPE = "AWS::S3::BucketPolicy"


MODELS = (
    AccessEntry,
    Addon,
    BucketPolicy,
    Cluster,
    Nodegroup,
    PlacementGroup,
    PodIdentityAssociation,
    SecurityGroupEgress,
    SubnetRouteTableAssociation,
)
