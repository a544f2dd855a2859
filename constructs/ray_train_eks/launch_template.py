"""What the launch templates of all node groups have in common: disk and metadata service."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2

# Root device of the AL2023 EKS AMIs.
_ROOT_DEVICE = "/dev/xvda"


def encrypted_root_volume(size_gib: int) -> ec2.CfnLaunchTemplate.BlockDeviceMappingProperty:
    """An encrypted gp3 root volume. EKS's default of 20 GiB cannot hold the training image."""
    return ec2.CfnLaunchTemplate.BlockDeviceMappingProperty(
        device_name=_ROOT_DEVICE,
        ebs=ec2.CfnLaunchTemplate.EbsProperty(
            volume_size=size_gib, volume_type="gp3", encrypted=True, delete_on_termination=True
        ),
    )


def imds_v2_for_the_host_only() -> ec2.CfnLaunchTemplate.MetadataOptionsProperty:
    """Tokens required, and a hop limit of 1: pods outside the host's network cannot reach the role."""
    return ec2.CfnLaunchTemplate.MetadataOptionsProperty(
        http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
    )
