"""What a node itself says of its EFA devices: libfabric's endpoints, and the kernel's byte counters."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

COUNTERS_ROOT = Path("/sys/class/infiniband")
RDM = "FI_EP_RDM"
_EFA_INSTALLER_BIN = "/opt/amazon/efa/bin"
_FI_INFO_TIMEOUT_S = 20


@dataclass(frozen=True)
class Endpoints:
    """What `fi_info -p efa` prints.

    Attributes:
        has_tool: whether fi_info exists here; without it nothing is known.
        types: endpoint types of the efa provider, such as FI_EP_RDM and FI_EP_DGRAM.
        error: why it found none.
    """

    has_tool: bool
    types: tuple[str, ...] = ()
    error: str = ""

    @property
    def has_rdm(self) -> bool:
        return RDM in self.types


def endpoints() -> Endpoints:
    """Asks libfabric for the efa provider's endpoints on this node."""
    tool = shutil.which("fi_info") or shutil.which("fi_info", path=_EFA_INSTALLER_BIN)
    if tool is None:
        return Endpoints(has_tool=False)
    command = [tool, "-p", "efa"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FI_INFO_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Endpoints(has_tool=True, error=str(error))
    types = tuple(sorted(set(re.findall(r"^\s*type:\s*(FI_EP_\w+)", done.stdout, re.MULTILINE))))
    return Endpoints(True, types, "" if types else (done.stderr.strip() or f"exit code {done.returncode}"))


def counters(root: Path = COUNTERS_ROOT) -> dict[str, int]:
    """The kernel's counters of this node's RDMA devices: "efa_0/1/tx_bytes" -> value.

    Args:
        root: where the devices are listed; tests give another folder.
    """
    found = {}
    for path in sorted(root.glob("*/ports/*/hw_counters/*")):
        try:
            value = int(path.read_text())
        except (OSError, ValueError):  # write-only or settings, such as "lifespan" of some drivers
            continue
        device, port = path.parts[-5], path.parts[-3]
        found[f"{device}/{port}/{path.name}"] = value
    return found


def increase(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """How much each counter that exists in both has grown."""
    return {name: after[name] - before[name] for name in before if name in after}


def sent_bytes(increases: Mapping[str, int]) -> int | None:
    """Bytes sent over all devices; None where the driver does not count them."""
    sent = [value for name, value in increases.items() if name.endswith("/tx_bytes")]
    return sum(sent) if sent else None
