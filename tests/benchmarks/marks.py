"""What a machine must have for some of the tests."""

from __future__ import annotations

import pytest

from benchmarks import hosts

# Network namespaces need root and iproute2, which a developer's machine may lack; the reason says which.
needs_hosts = pytest.mark.skipif(bool(hosts.why_not()), reason=str(hosts.why_not()))
