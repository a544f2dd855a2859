"""One log group for the functions that CDK adds to a stack by itself."""

from __future__ import annotations

from aws_cdk import CfnResource, RemovalPolicy, Stack
from aws_cdk import aws_logs as logs

from constructs import Construct


class FunctionLogs(Construct):
    """Without it each of CDK's functions makes a log group that never expires and outlives the stack."""

    def __init__(self, stack: Stack, id: str) -> None:
        """Sends the logs of every function that is in the stack by now to one group.

        Args:
            stack: a stack whose functions name no log group themselves.
        """
        super().__init__(stack, id)
        functions = [each for each in stack.node.find_all() if _is_function(each)]
        if not functions:
            return
        group = logs.LogGroup(
            self, "Group", retention=logs.RetentionDays.THREE_MONTHS, removal_policy=RemovalPolicy.DESTROY
        )
        for function in functions:
            function.add_property_override("LoggingConfig", {"LogGroup": group.log_group_name})


def _is_function(each: Construct) -> bool:
    return isinstance(each, CfnResource) and each.cfn_resource_type == "AWS::Lambda::Function"
