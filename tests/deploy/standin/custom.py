"""Custom resources: the capacity guard's own Lambda code is run; kubectl and Helm have no cluster to talk to.

The guard's function is unpacked from the archive that `cdk deploy` uploaded and run as Lambda would, with
AWS's addresses pointing at this stand-in. For all others there is only the journal's entry.
"""

from __future__ import annotations

import io
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from moto.awslambda.utils import get_backend as lambda_backend
from moto.cloudformation import parsing
from moto.cloudformation.custom_model import CustomModel

_LAMBDA = """
import importlib, json, sys, time
module, function = sys.argv[1].rsplit(".", 1)
class Context:
    end = time.monotonic() + float(sys.argv[2])
    def get_remaining_time_in_millis(self):
        return int((self.end - time.monotonic()) * 1000)
getattr(importlib.import_module(module), function)(json.load(sys.stdin), Context())
"""


def install(endpoint_url: str) -> None:
    """Makes CloudFormation use the custom resources of this module.

    Args:
        endpoint_url: of this stand-in, for the code of Lambda functions.
    """
    CustomResource.endpoint_url = endpoint_url
    parsing.CustomModel = CustomResource  # type: ignore[misc]


class CustomResource(CustomModel):
    """One custom resource of a stack."""

    endpoint_url = ""

    @classmethod
    def create_from_cloudformation_json(
        cls, name: str, resource: dict[str, Any], account_id: str, region: str, **more: Any
    ) -> CustomResource:
        event = {"RequestType": "Create", "LogicalResourceId": more["LogicalId"], "StackId": more["StackId"]}
        cls._send(event, resource, account_id, region)
        made = cls(region, "request", more["LogicalId"], name)
        made.set_data({})
        return made

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: CustomResource,
        new_resource_name: str,
        cloudformation_json: dict[str, Any],
        **_: Any,
    ) -> CustomResource:
        return original_resource

    @classmethod
    def delete_from_cloudformation_json(
        cls, resource_name: str, resource: dict[str, Any], account_id: str, region: str
    ) -> None:
        """Only the journal's entry."""

    @classmethod
    def _send(cls, event: dict[str, Any], resource: dict[str, Any], account_id: str, region: str) -> None:
        if resource["Type"] != "Custom::CapacityGuard":
            return
        properties = resource["Properties"]
        function = lambda_backend(account_id, region).get_function(properties["ServiceToken"])
        answer = _invoke(function, event | {"ResourceProperties": properties}, cls.endpoint_url, region)
        if answer["Status"] != "SUCCESS":
            raise parsing.ValidationError(message=f"{resource['Type']} failed: {answer['Reason']}")


def _invoke(function: Any, event: dict[str, Any], endpoint_url: str, region: str) -> dict[str, Any]:
    """Runs a Python function's own code; returns what it sends to the ResponseURL.

    Raises:
        RuntimeError: the function ended without an answer, for which CloudFormation would wait an hour.
    """
    answers: queue.Queue[dict[str, Any]] = queue.Queue()
    with tempfile.TemporaryDirectory() as code, _listen(answers) as url:
        zipfile.ZipFile(io.BytesIO(function.code_bytes)).extractall(code)
        address = f"http://127.0.0.1:{url.server_port}/"
        subprocess.run(
            [sys.executable, "-c", _LAMBDA, function.handler, str(function.timeout)],
            input=json.dumps(event | {"RequestId": "request", "ResponseURL": address}),
            env=os.environ
            | {"PYTHONPATH": code, "AWS_ENDPOINT_URL": endpoint_url, "AWS_DEFAULT_REGION": region},
            text=True,
            timeout=int(function.timeout),
            check=True,
        )
        url.shutdown()
    if answers.empty():
        raise RuntimeError(f"{function.handler} ended without an answer")
    return answers.get()


def _listen(answers: queue.Queue[dict[str, Any]]) -> HTTPServer:
    """A ResponseURL, serving until it is shut down."""

    class Receiver(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            answers.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
