"""CloudFormation as moto has it, made to behave where our tests look.

moto skips a resource type it does not know and reports success; deletes in no order and, of many types, not
at all. Here everything that is created, updated or deleted is written down, deletion goes the opposite way
of creation, and what moto forgets to delete is deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moto.awslambda.utils import get_backend as lambda_backend
from moto.cloudformation import parsing
from moto.cloudformation.models import Stack
from moto.ec2.models import ec2_backends
from moto.ssm.models import Parameter
from standin import resources


class Journal:
    """What CloudFormation did, in order, one JSON object a line: op, stack, type, id, properties."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def note(self, op: str, stack: str, logical_id: str, resource: dict[str, Any]) -> None:
        """Appends an operation: Create, Update, Delete, or Skip for a type nobody knows."""
        entry = {"op": op, "stack": stack, "id": logical_id, "type": resource["Type"]}
        entry["properties"] = resource.get("Properties", {})
        with self._path.open("a") as file:
            file.write(json.dumps(entry, default=str) + "\n")


def install(journal: Journal) -> None:
    """Changes moto, in this process."""
    _add_models()
    _name_parameters()
    _note_creations(journal)
    _note_updates(journal)
    _delete_in_reverse(journal)
    _roll_back()


def _add_models() -> None:
    known = parsing.get_model_list()
    own = [model for model in resources.MODELS if model not in known]
    # Of two models of a type the later one counts.
    parsing.get_model_list = lambda: [*known, *own]  # type: ignore[assignment]
    parsing.get_model_map.cache_clear()
    parsing.get_name_type_map.cache_clear()


def _name_parameters() -> None:
    """A Systems Manager parameter without a name gets one, as CloudFormation gives it."""
    create = Parameter.create_from_cloudformation_json.__func__  # type: ignore[attr-defined]

    def named(
        cls: type, name: str, resource: dict[str, Any], account_id: str, region: str, **more: Any
    ) -> Any:
        resource["Properties"].setdefault("Name", f"CFN-{name}")
        return create(cls, name, resource, account_id, region, **more)

    Parameter.create_from_cloudformation_json = classmethod(named)  # type: ignore[assignment]


def _note_creations(journal: Journal) -> None:
    create = parsing.parse_and_create_resource

    def noted(logical_id: str, resource: dict[str, Any], found: parsing.ResourceMap, **where: str) -> Any:
        created = create(logical_id, resource, found, **where)
        is_wanted = "Condition" not in resource or found.lazy_condition_map[resource["Condition"]]
        if is_wanted:
            op = "Skip" if created is None else "Create"
            journal.note(op, found["AWS::StackName"], logical_id, parsing.clean_json(dict(resource), found))
        return created

    parsing.parse_and_create_resource = noted  # type: ignore[assignment]


def _note_updates(journal: Journal) -> None:
    update = parsing.parse_and_update_resource

    def noted(logical_id: str, resource: dict[str, Any], found: parsing.ResourceMap, **where: str) -> Any:
        updated = update(logical_id, resource, found, **where)
        op = "Skip" if updated is None else "Update"
        journal.note(op, found["AWS::StackName"], logical_id, parsing.clean_json(dict(resource), found))
        return updated or found[logical_id]

    parsing.parse_and_update_resource = noted  # type: ignore[assignment]


def _delete_in_reverse(journal: Journal) -> None:
    delete_one = parsing.ResourceMap._delete_resource

    def delete(self: parsing.ResourceMap) -> None:
        # Resources stand here in the order in which they were created, each after what it depends on. They
        # stay when they are gone: moto would make them anew to answer for the outputs of a deleted stack.
        gone = self.__dict__.setdefault("gone", set())  # a stack that was rolled back is deleted once more
        created = [key for key in self._parsed_resources if key in self._resource_json_map.keys() - gone]
        for logical_id in reversed(created):
            resource = self._resource_json_map[logical_id]
            if resource.get("DeletionPolicy") != "Retain":
                self._delete_resource(self._parsed_resources[logical_id], resource)
                gone.add(logical_id)

    def noted(self: parsing.ResourceMap, created: Any, resource: dict[str, Any]) -> None:
        if created is None:
            return
        delete_one(self, created, resource)
        if forgotten := _FORGOTTEN.get(resource["Type"]):
            forgotten(self._account_id, self._region_name, created, parsing.clean_json(dict(resource), self))
        journal.note(
            "Delete", self["AWS::StackName"], created.logical_resource_id, {"Type": resource["Type"]}
        )

    parsing.ResourceMap.delete = delete  # type: ignore[method-assign]
    parsing.ResourceMap._delete_resource = noted  # type: ignore[method-assign]


def _roll_back() -> None:
    """A stack whose creation fails deletes what it had made and says why, as CloudFormation does."""
    create = Stack.create_resources

    def create_or_roll_back(self: Stack) -> None:
        try:
            # An update may ask for the previous value of a parameter that was never given.
            for name, parameter in self.template_dict.get("Parameters", {}).items():
                self.parameters.setdefault(name, parameter.get("Default"))
            create(self)
        except Exception as error:
            self._add_stack_event("CREATE_FAILED", resource_status_reason=str(error))
            self.resource_map.delete()
            self.status = "ROLLBACK_COMPLETE"
            self._add_stack_event("ROLLBACK_COMPLETE")

    Stack.create_resources = create_or_roll_back  # type: ignore[method-assign]


_Delete = Callable[[str, str, Any, dict[str, Any]], Any]


def _by_ec2(name: str) -> _Delete:
    """Deletes through the method of moto's EC2 backend that takes the physical id."""

    def delete(account: str, region: str, created: Any, resource: dict[str, Any]) -> None:
        getattr(ec2_backends[account][region], name)(created.physical_resource_id)

    return delete


def _detach_gateway(account: str, region: str, created: Any, resource: dict[str, Any]) -> None:
    properties = resource["Properties"]
    ec2_backends[account][region].detach_internet_gateway(
        properties["InternetGatewayId"], properties["VpcId"]
    )


def _delete_route(account: str, region: str, created: Any, resource: dict[str, Any]) -> None:
    properties = resource["Properties"]
    ec2_backends[account][region].delete_route(properties["RouteTableId"], properties["DestinationCidrBlock"])


def _delete_layer(account: str, region: str, created: Any, resource: dict[str, Any]) -> None:
    lambda_backend(account, region).delete_layer_version(created.name, created.version)


# Types that moto creates and cannot delete.
_FORGOTTEN: dict[str, _Delete] = {
    "AWS::EC2::EIP": lambda account, region, created, _: ec2_backends[account][region].release_address(
        allocation_id=created.allocation_id
    ),
    "AWS::EC2::FlowLog": lambda account, region, created, _: ec2_backends[account][region].delete_flow_logs(
        [created.physical_resource_id]
    ),
    "AWS::EC2::InternetGateway": _by_ec2("delete_internet_gateway"),
    "AWS::EC2::NatGateway": _by_ec2("delete_nat_gateway"),
    "AWS::EC2::Route": _delete_route,
    "AWS::EC2::RouteTable": _by_ec2("delete_route_table"),
    "AWS::EC2::VPCEndpoint": lambda account, region, created, _: ec2_backends[account][
        region
    ].delete_vpc_endpoints([created.physical_resource_id]),
    "AWS::EC2::VPCGatewayAttachment": _detach_gateway,
    "AWS::Lambda::LayerVersion": _delete_layer,
}
