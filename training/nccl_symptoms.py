"""What NCCL, aws-ofi-nccl and libfabric write when EFA cannot be used: likely cause and remedy of each line.

A symptom explains a failure that was found by other means; it never is a failure itself. (aws-ofi-nccl says
"No eligible providers were found" for one protocol and then succeeds with the next.)

Sources of the texts: NCCL 2.28-2.30 (src/bootstrap.cc, src/plugin/net.cc, src/plugin/plugin_open.cc),
aws-ofi-nccl 1.9-1.20 (src/nccl_ofi_net.cpp, nccl_ofi_rdma.cpp, nccl_ofi_sendrecv.cpp), libfabric's EFA
provider.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """A line with a known cause.

    Attributes:
        name: stable word for JSON and tests.
        pattern: found in the text of the line.
        cause: what is probably wrong.
        remedy: what to change.
    """

    name: str
    pattern: re.Pattern[str]
    cause: str
    remedy: str


def _symptom(name: str, pattern: str, cause: str, remedy: str) -> Symptom:
    return Symptom(name, re.compile(pattern), cause, remedy)


# Most telling first: the first one that a rank's log shows explains that rank's failure.
SYMPTOMS = (
    _symptom(
        "tcp-forced",
        r"(?i)NCCL_NET set by environment to (Socket|IB)\b|NCCL_NET_PLUGIN set by environment to none\b",
        "the environment forces NCCL away from EFA",
        "remove NCCL_NET and NCCL_NET_PLUGIN=none from the pod and the runtime environment, "
        "or set NCCL_NET=Libfabric",
    ),
    _symptom(
        "security-group",
        r"(?i)Unresponsive receiver|\b(?:error:?|prov_errno:?) \(?4126\b|\(4126\)",
        "packets of EFA do not reach the other node: "
        "the security group does not allow all traffic to and from itself",
        "give the EFA security group a self-referencing rule for all traffic, both ingress and egress "
        "(egress to 0.0.0.0/0 does not cover EFA), and keep the nodes in one subnet",
    ),
    _symptom(
        "memlock",
        r"(?i)memlock|RC: -?12\b.*Cannot allocate memory|\(-12\) Cannot allocate memory|\(4112\)",
        "memory could not be registered with the device: the limit on locked memory (memlock) is too low",
        "raise it: `ulimit -l` must print unlimited in the container "
        "(containerd's LimitMEMLOCK=infinity on the node)",
    ),
    _symptom(
        "interface-name",
        r"(?i)no socket interface found|No (usable listening )?interface found"
        r"|no device found (matching|after excluding)",
        "no network interface has the name that NCCL_SOCKET_IFNAME (or NCCL_OOB_NET_IFNAME) gives",
        "set NCCL_SOCKET_IFNAME to an interface of the pod (`ip -br link` in it; eth0 with the VPC CNI)",
    ),
    _symptom(
        "no-eligible-provider",
        r"No eligible providers were found|Couldn't find any optimal provider",
        "libfabric sees no EFA device in this pod",
        "request and limit vpc.amazonaws.com/efa in the pod, see that the EFA device plugin runs on the "
        "node, and that FI_PROVIDER is efa or unset",
    ),
    _symptom(
        "plugin-not-loadable",
        r"cannot open shared object file|undefined symbol",
        "a library of the network plugin cannot be loaded",
        "put libfabric (/opt/amazon/efa/lib) and the plugin's folder on LD_LIBRARY_PATH, "
        "or use the training image",
    ),
    _symptom(
        "plugin-not-found",
        r"NET/Plugin ?: (Could not find:.*libnccl-net|No plugin found)",
        "NCCL found no network plugin: aws-ofi-nccl is not in the image or not on LD_LIBRARY_PATH",
        "use the training image (it holds aws-ofi-nccl), set NCCL_NET_PLUGIN=ofi "
        "and leave LD_LIBRARY_PATH as the image sets it",
    ),
    _symptom(
        "plugin-init-failed",
        r"Failed to initialize NET plugin (AWS )?(Libfabric|OFI)|NET/OFI Initializing plugin failed",
        "the plugin aws-ofi-nccl was found but could not start: usually no EFA device is visible",
        "request and limit vpc.amazonaws.com/efa in the pod, and read the NET/OFI lines just before this one",
    ),
    _symptom(
        "failed-closed",
        r"Failed to initialize any NET plugin",
        "NCCL_NET names a network that NCCL could not start",
        "make the plugin and the EFA device available "
        "(request vpc.amazonaws.com/efa; use the training image)",
    ),
)

BY_NAME = {symptom.name: symptom for symptom in SYMPTOMS}


def recognise(text: str) -> Symptom | None:
    """The first symptom that a line shows, or None."""
    return next((symptom for symptom in SYMPTOMS if symptom.pattern.search(text)), None)
