"""What all stacks of the app share."""

from __future__ import annotations

import aws_cdk as cdk

from constructs import Construct
from settings import NetworkSettings


class AppStack(cdk.Stack):
    """A stack in the settings' Region that knows its Availability Zones without asking AWS."""

    def __init__(self, scope: Construct, id: str, network: NetworkSettings, description: str) -> None:
        self._azs = list(network.azs)
        super().__init__(scope, id, env=cdk.Environment(region=network.region), description=description)

    @property
    def availability_zones(self) -> list[str]:
        """The settings' zones. CDK would look them up, which needs credentials at synth."""
        return self._azs
