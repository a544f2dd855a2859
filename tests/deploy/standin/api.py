"""The API calls of this app and its tests that moto does not answer."""

from __future__ import annotations

import json
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.responses import EC2Response
from moto.eks import urls
from moto.eks.responses import EKSResponse
from moto.s3.models import S3Backend
from moto.servicequotas.models import ServiceQuotasBackend
from standin.resources import KEPT, lower_first

# vCPUs of the G family the account may run: two g6.12xlarge and nothing beside them.
G_QUOTA_VCPUS = 96


def install() -> None:
    """Adds them, in this process."""
    ServiceQuotasBackend.get_service_quota = _quota  # type: ignore[method-assign]
    EC2Response.describe_capacity_reservations = _no_reservations
    EC2Response.describe_placement_groups = _placement_groups
    S3Backend.get_bucket_policy = _bucket_policy  # type: ignore[method-assign]
    EKSResponse.list_addons = _addons
    EKSResponse.list_access_entries = _access_entries
    EKSResponse.list_associated_access_policies = _access_policies
    EKSResponse.list_pod_identity_associations = _pod_identities
    cluster = "{0}/clusters/(?P<name>[^/]+)"
    for path in ("addons", "access-entries", "access-entries/(?P<principalArn>.+)/access-policies"):
        urls.url_paths[f"{cluster}/{path}$"] = urls.response.dispatch
    urls.url_paths[f"{cluster}/pod-identity-associations$"] = urls.response.dispatch


def _quota(self: ServiceQuotasBackend, service_code: str, quota_code: str) -> dict[str, Any]:
    values = {"L-DB2E81BA": G_QUOTA_VCPUS}
    return {"ServiceCode": service_code, "QuotaCode": quota_code, "Value": values[quota_code]}


def _no_reservations(self: EC2Response) -> ActionResult:
    return ActionResult({"CapacityReservations": []})


def _placement_groups(self: EC2Response) -> ActionResult:
    groups = KEPT["AWS::EC2::PlacementGroup"].items()
    return ActionResult(
        {"PlacementGroups": [{"GroupName": name, **properties} for name, properties in groups]}
    )


def _bucket_policy(self: S3Backend, bucket_name: str) -> bytes | None:
    rows = [row for row in KEPT["AWS::S3::BucketPolicy"].values() if row["Bucket"] == bucket_name]
    return json.dumps(rows[0]["PolicyDocument"]).encode() if rows else None


def _of_cluster(self: EKSResponse, resource_type: str) -> list[dict[str, Any]]:
    name = self._get_param("name")
    return [row for row in KEPT[resource_type].values() if row["ClusterName"] == name]


def _addons(self: EKSResponse) -> ActionResult:
    return ActionResult({"addons": [row["AddonName"] for row in _of_cluster(self, "AWS::EKS::Addon")]})


def _access_entries(self: EKSResponse) -> ActionResult:
    rows = _of_cluster(self, "AWS::EKS::AccessEntry")
    return ActionResult({"accessEntries": [row["PrincipalArn"] for row in rows]})


def _access_policies(self: EKSResponse) -> ActionResult:
    principal = self._get_param("principalArn")
    rows = [row for row in _of_cluster(self, "AWS::EKS::AccessEntry") if row["PrincipalArn"] == principal]
    return ActionResult({"associatedAccessPolicies": lower_first(rows[0]["AccessPolicies"])})


def _pod_identities(self: EKSResponse) -> ActionResult:
    rows = _of_cluster(self, "AWS::EKS::PodIdentityAssociation")
    return ActionResult({"associations": [lower_first(row) for row in rows]})
