"""What synthesizes but deserves a second thought: one function for each warning."""

from __future__ import annotations

import ipaddress
import re

from settings.model import Settings

# Standard and extended support have both ended for these (AWS's EKS version calendar, read November 2026).
_EKS_ENDED = ("1.30", "1.31")


def _moving_tag(settings: Settings) -> str | None:
    image = settings.ray.image
    if "@sha256:" in image:
        return None
    tag = image.rpartition(":")[2] if ":" in image.rpartition("/")[2] else "latest"
    if re.fullmatch(r".*v\d+\.\d+\.\d+", tag):
        return None
    return (
        f"image = {image}: the tag {tag} moves with security rebuilds, so two deployments can run different "
        "images. A tag that ends in vX.Y.Z keeps one build; only <name>@sha256:<digest> is byte-identical."
    )


def _ended_version(settings: Settings) -> str | None:
    version = settings.cluster.kubernetes_version
    if version not in _EKS_ENDED:
        return None
    return (
        f"kubernetes_version = {version}: EKS no longer creates clusters of this version; use 1.34 or later."
    )


def _open_endpoint(settings: Settings) -> str | None:
    opened = [cidr for cidr in settings.cluster.api_public_cidrs if ipaddress.ip_network(cidr).prefixlen == 0]
    return (
        f"api_public_cidrs = {','.join(opened)}: the Kubernetes API answers the whole internet."
        if opened
        else None
    )


def _nobody_is_admin(settings: Settings) -> str | None:
    if settings.cluster.admin_role_arns:
        return None
    return (
        "admin_role_arns = (empty): no role can use kubectl on the cluster; "
        "name the IAM roles that shall, arn:aws:iam::<account>:role/<name>."
    )


def _block_not_started(settings: Settings) -> str | None:
    if settings.nodes.capacity != "capacity-block" or settings.nodes.capacity_block_started:
        return None
    text = (
        "capacity_block_started = false: the GPU node group is created with 0 nodes; "
        "set it to true once the block has started."
    )
    if settings.ray.train:
        text += (
            " Until then deploy with train=false: a RayJob waits for the nodes only until its deadline "
            f"(job_deadline_s = {settings.ray.job_deadline_s}), and a finished RayJob never runs again."
        )
    return text


_WARNINGS = (_moving_tag, _ended_version, _open_endpoint, _nobody_is_admin, _block_not_started)


def warnings(settings: Settings) -> list[str]:
    """One sentence for each thing the user should know before deploying."""
    return [text for warning in _WARNINGS if (text := warning(settings))]
