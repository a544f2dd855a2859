"""The five stacks and how they depend on each other."""

from __future__ import annotations

import dataclasses

import aws_cdk as cdk
from ray_train_eks.cost import hourly_cost

from settings import Settings, warnings
from stacks.cluster import ClusterStack
from stacks.network import NetworkStack
from stacks.nodes import NodesStack
from stacks.platform import PlatformStack
from stacks.training import TrainingStack


def build(app: cdk.App, settings: Settings) -> list[cdk.Stack]:
    """Adds the stacks to an app.

    Nothing depends on Nodes: a dependency would make `cdk destroy <prefix>-Nodes` destroy the dependents too
    (docs/decisions/0004).

    Raises:
        SettingsError: the KubeRay operator would refuse what the settings lead to.
    """
    prefix, where = settings.prefix, settings.network
    cached_image = settings.ray.image if settings.ray.image_pull_through_cache else None
    network = NetworkStack(app, f"{prefix}-Network", where, prefix=prefix, cached_image=cached_image)
    cache = network.image_cache
    cluster_stack = ClusterStack(
        app,
        f"{prefix}-Cluster",
        where,
        name=prefix,
        settings=settings.cluster,
        vpc=network.vpc,
        image_cache=cache,
    )
    cluster = cluster_stack.cluster
    nodes = NodesStack(
        app, f"{prefix}-Nodes", where, settings=settings.nodes, cluster=cluster, image_cache=cache
    )
    platform = PlatformStack(
        app,
        f"{prefix}-Platform",
        where,
        settings=settings.platform,
        cluster=cluster,
        gpu_instance_type=settings.nodes.gpu_instance_type,
    )
    training = TrainingStack(
        app, f"{prefix}-Training", _with_image(settings, cache.image if cache else None), cluster=cluster
    )
    # The operator must outlive what it has finalizers on, and the CRDs must exist first.
    training.add_stack_dependency(platform)
    _tell_cost(nodes, settings)
    for number, text in enumerate(warnings(settings)):
        cdk.Annotations.of(network).add_warning_v2(f"{prefix}:settings-{number}", text)
    return [network, cluster_stack, nodes, platform, training]


def _tell_cost(nodes: NodesStack, settings: Settings) -> None:
    """Says at synth what is on costs, and keeps it as an output of the stack that most of it is for."""
    cost = hourly_cost(
        region=settings.network.region,
        gpu_instance_type=settings.nodes.gpu_instance_type,
        num_gpu_nodes=settings.nodes.num_gpu_nodes,
        system_instance_type=settings.cluster.system_instance_type,
        num_system_nodes=settings.cluster.num_system_nodes,
        num_nat_gateways=settings.network.num_nat_gateways,
        capacity=settings.nodes.capacity,
    )
    cdk.Annotations.of(nodes).add_info(f"Cost of all stacks: {cost}")
    cdk.CfnOutput(nodes, "HourlyCost", value=str(cost), description="Of all stacks; this one is the GPU part")


def _with_image(settings: Settings, image: str | None) -> Settings:
    """The settings with pods pulling `image` instead, if there is one."""
    if image is None:
        return settings
    return dataclasses.replace(settings, ray=dataclasses.replace(settings.ray, image=image))
