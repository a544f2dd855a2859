"""Network interfaces of an EFA launch template, by instance type."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import aws_ec2 as ec2

from ray_train_eks.instance_types import InstanceType


def efa_interfaces(
    instance: InstanceType, security_group_ids: Sequence[str]
) -> list[ec2.CfnLaunchTemplate.NetworkInterfaceProperty]:
    """The interfaces that give a type all the EFA it has (EC2 User Guide, "Maximize network bandwidth").

    One network card: one interface that is ENA and EFA at once. Several: an ENA primary, which carries the
    pods' IP traffic and is never efa-only, and an efa-only interface on every card that has EFA. Those need
    no IP address, so a p5 takes one address of the subnet for its node rather than 32.

    Args:
        instance: facts of the type.
        security_group_ids: named here and nowhere else in the template; EC2 refuses both places at once.

    Returns:
        The interfaces, primary first. No subnet: a managed node group's template may not name one.
    """
    if instance.efa_cards == 1:
        return [_interface(0, 0, "efa", security_group_ids, associate_public_ip_address=False)]
    interfaces = [_interface(0, 0, "interface", security_group_ids)]
    if instance.efa_on_first_card:
        interfaces.append(_interface(0, 1, "efa-only", security_group_ids))
    num_other_cards = instance.efa_cards - instance.efa_on_first_card
    return interfaces + [
        _interface(card, 0, "efa-only", security_group_ids) for card in range(1, num_other_cards + 1)
    ]


def _interface(
    card: int,
    device: int,
    interface_type: str,
    security_group_ids: Sequence[str],
    associate_public_ip_address: bool | None = None,  # EC2 refuses it, even false, beside a second interface
) -> ec2.CfnLaunchTemplate.NetworkInterfaceProperty:
    return ec2.CfnLaunchTemplate.NetworkInterfaceProperty(
        network_card_index=card,
        device_index=device,
        interface_type=interface_type,
        groups=list(security_group_ids),
        associate_public_ip_address=associate_public_ip_address,
        delete_on_termination=True,
    )
