"""How the capacity of a GPU node group is had, and which combinations cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks

from ray_train_eks.instance_types import InstanceType

Kind = Literal["on-demand", "reservation", "capacity-block"]


@dataclass(frozen=True)
class NodeCapacity:
    """On-Demand, an On-Demand Capacity Reservation (ODCR), or a Capacity Block for ML.

    Attributes:
        kind: which of the three.
        reservation_id: `cr-...` of the ODCR or the block; empty for On-Demand.
        block_started: false keeps a block's node group at 0 nodes, since EC2 refuses launches before then.

    Raises:
        ValueError: the three contradict each other; the message says what to change.
    """

    kind: Kind = "on-demand"
    reservation_id: str = ""
    block_started: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("on-demand", "reservation", "capacity-block"):
            raise ValueError(f"capacity {self.kind!r}: use on-demand, reservation or capacity-block")
        if self.kind == "on-demand" and self.reservation_id:
            raise ValueError(
                f"capacity on-demand with reservation {self.reservation_id}: On-Demand launches ignore "
                "it; use reservation or capacity-block"
            )
        if self.kind != "on-demand" and not self.reservation_id:
            raise ValueError(f"capacity {self.kind}: needs the id of the reservation, cr-...")
        if self.block_started and self.kind != "capacity-block":
            raise ValueError(f"block_started with capacity {self.kind}: only a capacity-block starts")

    def check_instance_type(self, instance: InstanceType) -> None:
        """Refuses a Capacity Block of a type that has none.

        EC2 sells Capacity Blocks for P and Trn types only (EC2 User Guide, "Capacity Blocks for ML").

        Raises:
            ValueError: with the types to use instead.
        """
        if self.kind == "capacity-block" and not instance.name.startswith("p"):
            raise ValueError(
                f"capacity capacity-block with {instance.name}: EC2 offers blocks for P types only; "
                "use reservation"
            )

    @property
    def can_launch(self) -> bool:
        """Whether nodes are asked for now."""
        return self.kind != "capacity-block" or self.block_started

    @property
    def wants_placement_group(self) -> bool:
        """Whether the nodes get a cluster placement group of their own.

        A reservation fixes where its instances are. One that was not made inside our placement group cannot
        be used from it: EC2 answers InsufficientInstanceCapacity (eksctl #7949; fixed there the same way).
        """
        return self.kind == "on-demand"

    @property
    def capacity_type(self) -> eks.CapacityType:
        """EKS's name for it."""
        is_block = self.kind == "capacity-block"
        return eks.CapacityType.CAPACITY_BLOCK if is_block else eks.CapacityType.ON_DEMAND

    @property
    def reservation_specification(
        self,
    ) -> ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty | None:
        """Targets exactly this reservation, so that a wrong one fails instead of launching On-Demand."""
        if not self.reservation_id:
            return None
        target = ec2.CfnLaunchTemplate.CapacityReservationTargetProperty(
            capacity_reservation_id=self.reservation_id
        )
        return ec2.CfnLaunchTemplate.CapacityReservationSpecificationProperty(
            capacity_reservation_target=target
        )

    @property
    def market_options(self) -> ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty | None:
        """The market type of a Capacity Block."""
        if self.kind != "capacity-block":
            return None
        return ec2.CfnLaunchTemplate.InstanceMarketOptionsProperty(market_type="capacity-block")
