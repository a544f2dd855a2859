"""What a deployment costs by the hour, from a small dated table: known prices only, never a guess."""

from __future__ import annotations

from dataclasses import dataclass

PRICES_AS_OF = "July 2026"

# On-Demand, Linux, USD an hour. To be checked against https://aws.amazon.com/ec2/pricing/on-demand/ before
# anyone relies on them. us-east-1: AWS's price list of 20 July 2026, as recorded in karpenter-provider-aws
# (pkg/providers/pricing/zz_generated.pricing_aws.go). us-east-2: the types of the default deployment, which
# give the README's "about 9.50 USD" of AWS's sample "Multi-Node Ray Train on EKS". Any other pair is unknown.
_INSTANCE_USD = {
    "us-east-1": {
        "g4dn.8xlarge": 2.176,
        "g4dn.12xlarge": 3.912,
        "g4dn.16xlarge": 4.352,
        "g4dn.metal": 7.824,
        "g5.8xlarge": 2.448,
        "g5.12xlarge": 5.672,
        "g5.16xlarge": 4.096,
        "g5.24xlarge": 8.144,
        "g5.48xlarge": 16.288,
        "g6.8xlarge": 2.0144,
        "g6.12xlarge": 4.6016,
        "g6.16xlarge": 3.3968,
        "g6.24xlarge": 6.6752,
        "g6.48xlarge": 13.3504,
        "gr6.8xlarge": 2.4464,
        "g6e.8xlarge": 4.5286,
        "g6e.12xlarge": 10.4926,
        "g6e.16xlarge": 7.5772,
        "g6e.24xlarge": 15.0656,
        "g6e.48xlarge": 30.1312,
        "g7e.8xlarge": 5.2682,
        "g7e.12xlarge": 8.2861,
        "g7e.24xlarge": 16.5722,
        "g7e.48xlarge": 33.1443,
        "p4d.24xlarge": 21.9576,
        "p4de.24xlarge": 27.4471,
        "p5.4xlarge": 6.88,
        "p5.48xlarge": 55.04,
        "p5en.48xlarge": 63.296,
        "p6-b200.48xlarge": 113.9328,
        "p6-b300.48xlarge": 142.416,
        "m6i.large": 0.096,
        "m6i.xlarge": 0.192,
        "m6i.2xlarge": 0.384,
        "m6i.4xlarge": 0.768,
        "m7i.large": 0.1008,
        "m7i.xlarge": 0.2016,
        "m7i.2xlarge": 0.4032,
        "m7i.4xlarge": 0.8064,
        "m8i.large": 0.1058,
        "m8i.xlarge": 0.2117,
        "m8i.2xlarge": 0.4234,
        "m8i.4xlarge": 0.8467,
        "c7i.large": 0.0892,
        "c7i.xlarge": 0.1785,
        "c7i.2xlarge": 0.357,
        "c7i.4xlarge": 0.714,
        "r7i.large": 0.1323,
        "r7i.xlarge": 0.2646,
        "r7i.2xlarge": 0.5292,
        "r7i.4xlarge": 1.0584,
    },
    "us-east-2": {
        "g6.12xlarge": 4.6016,
        "m7i.xlarge": 0.2016,
    },
}
# USD an hour: a cluster in standard support (https://aws.amazon.com/eks/pricing/), the same in every Region;
# a NAT gateway (https://aws.amazon.com/vpc/pricing/) in the Regions above.
_CONTROL_PLANE_USD = 0.10
_NAT_GATEWAY_USD = {"us-east-1": 0.045, "us-east-2": 0.045}


@dataclass(frozen=True)
class HourlyCost:
    """USD an hour, split into what destroying the GPU nodes saves, and the rest.

    Attributes:
        gpu_usd: the GPU nodes; None if a price is unknown.
        rest_usd: control plane, system nodes and NAT gateways; None if a price is unknown.
        notes: what is unknown, and how the GPU nodes are billed if not by the hour of use.
    """

    gpu_usd: float | None
    rest_usd: float | None
    notes: tuple[str, ...] = ()

    @property
    def total_usd(self) -> float | None:
        """Both together; None if either is unknown."""
        if self.gpu_usd is None or self.rest_usd is None:
            return None
        return self.gpu_usd + self.rest_usd

    def __str__(self) -> str:
        gpu, rest = _usd(self.gpu_usd), _usd(self.rest_usd)
        total = "unknown" if self.total_usd is None else f"{_usd(self.total_usd)} an hour"
        head = (
            f"{total} (GPU nodes {gpu}, the rest {rest}; "
            f"list prices of {PRICES_AS_OF}, without disks, logs, S3 and traffic through NAT)"
        )
        return ". ".join([head, *self.notes])


def hourly_cost(
    *,
    region: str,
    gpu_instance_type: str,
    num_gpu_nodes: int,
    system_instance_type: str,
    num_system_nodes: int,
    num_nat_gateways: int,
    capacity: str = "on-demand",
) -> HourlyCost:
    """What is on costs, by the hour.

    Args:
        region: AWS Region.
        gpu_instance_type: of the GPU nodes.
        num_gpu_nodes: 0 while the Nodes stack is destroyed.
        system_instance_type: of the system nodes.
        num_system_nodes: their number.
        num_nat_gateways: their number.
        capacity: "on-demand", "reservation" or "capacity-block".
    """
    is_block = capacity == "capacity-block"
    gpu_usd = 0.0 if is_block else _nodes_usd(region, gpu_instance_type, num_gpu_nodes)
    system_usd = _nodes_usd(region, system_instance_type, num_system_nodes)
    nat_usd = _NAT_GATEWAY_USD.get(region)
    rest_usd = None
    if system_usd is not None and nat_usd is not None:
        rest_usd = _CONTROL_PLANE_USD + system_usd + num_nat_gateways * nat_usd
    unknown = [] if gpu_usd is not None else [gpu_instance_type]
    unknown += [] if system_usd is not None else [system_instance_type]
    unknown += [] if nat_usd is not None else ["a NAT gateway"]
    notes = [f"No price in the table for {' and '.join(unknown)} in {region}"] if unknown else []
    if capacity == "reservation":
        notes.append("The reservation is billed from when it is made until it is cancelled, used or not")
    if is_block:
        notes.append("The Capacity Block was paid in advance: its nodes cost nothing more by the hour")
    return HourlyCost(gpu_usd, rest_usd, tuple(notes))


def _nodes_usd(region: str, instance_type: str, num_nodes: int) -> float | None:
    if not num_nodes:
        return 0.0
    each_usd = _INSTANCE_USD.get(region, {}).get(instance_type)
    return None if each_usd is None else num_nodes * each_usd


def _usd(amount: float | None) -> str:
    return "unknown" if amount is None else f"{amount:.2f} USD"
