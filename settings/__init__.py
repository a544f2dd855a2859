"""Every setting of the app: one frozen, typed, validated object made from the CDK context.

`cdk.json` holds each setting with its default; `-c name=value` overrides one. The context is read once, in
`load`; below it, everything gets the slice it needs. What is wrong is reported all at once, each line naming
the setting, its value and what would be right.
"""

from settings.advice import warnings
from settings.checks import kubectl_layer_package
from settings.model import (
    JOB_DIGEST_LENGTH,
    MAX_RAY_CLUSTER_NAME,
    MAX_RAY_JOB_NAME,
    ClusterSettings,
    NetworkSettings,
    NodesSettings,
    PlatformSettings,
    RaySettings,
    Settings,
)
from settings.reader import SettingsError, load, setting_types

__all__ = [
    "JOB_DIGEST_LENGTH",
    "MAX_RAY_CLUSTER_NAME",
    "MAX_RAY_JOB_NAME",
    "ClusterSettings",
    "NetworkSettings",
    "NodesSettings",
    "PlatformSettings",
    "RaySettings",
    "Settings",
    "SettingsError",
    "kubectl_layer_package",
    "load",
    "setting_types",
    "warnings",
]
