"""CDK's kubectl handler, unmodified, with the layer's own kubectl, sends our manifests to a Kubernetes API.

The API is a stub that knows no object and accepts every one; `aws` is a script that writes the kubeconfig.
Seen here: the handler and this kubectl take our manifests, ask the API for strict validation, and send
exactly these objects. Whether KubeRay's schemas accept the Ray objects is the subject of tests/k8s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import pytest

KUBECTL_RESOURCE = "Custom::AWSCDK-EKS-KubernetesResource"
HELM_RESOURCE = "Custom::AWSCDK-EKS-HelmChart"
# What the stub serves: group/version -> plural -> kind, whether namespaced.
_APIS = {
    "v1": {"namespaces": ("Namespace", False), "serviceaccounts": ("ServiceAccount", True)},
    "networking.k8s.io/v1": {"networkpolicies": ("NetworkPolicy", True)},
    "ray.io/v1": {"rayclusters": ("RayCluster", True), "rayjobs": ("RayJob", True)},
}


@dataclass(frozen=True)
class Request:
    """A change that kubectl asked the API for."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: Any


class Api(BaseHTTPRequestHandler):
    """As much of a Kubernetes API server as `kubectl apply` and `kubectl delete` need."""

    requests: list[Request]

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.rstrip("/")
        self._reply(*_read(path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._note("POST", body)
        self._reply(201, body)

    def do_DELETE(self) -> None:
        self._note("DELETE", None)
        self._reply(200, {"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def _note(self, method: str, body: Any) -> None:
        url = urlsplit(self.path)
        self.requests.append(Request(method, url.path, parse_qs(url.query), body))

    def _reply(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def _read(path: str) -> tuple[int, Any]:
    """Discovery, and which parameters there are; every object is missing."""
    if path == "/api":
        return 200, {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(api) for api in _APIS if "/" in api]
        return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return 200, {
            "paths": {_root(api)[1:]: {"serverRelativeURL": f"/openapi/v3{_root(api)}"} for api in _APIS}
        }
    for api, resources in _APIS.items():
        if path == _root(api):
            rows = [_resource(plural, *facts) for plural, facts in resources.items()]
            return 200, {"kind": "APIResourceList", "groupVersion": api, "resources": rows}
        if path == f"/openapi/v3{_root(api)}":
            return 200, _parameters(api)
    return 404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


def _root(api: str) -> str:
    return f"/apis/{api}" if "/" in api else f"/api/{api}"


def _group(api: str) -> dict[str, Any]:
    group, version = api.split("/")
    served = {"groupVersion": api, "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}


def _resource(plural: str, kind: str, namespaced: bool) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "patch"]
    return {"name": plural, "singularName": "", "namespaced": namespaced, "kind": kind, "verbs": verbs}


def _parameters(api: str) -> dict[str, Any]:
    """OpenAPI by which kubectl learns that the server can validate strictly."""
    group, _, version = api.rpartition("/")
    validation = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
    paths = {
        f"{_root(api)}/{plural}/{{name}}": {
            "patch": {
                "parameters": [validation],
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
            }
        }
        for plural, (kind, _) in _APIS[api].items()
    }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1.36.0"}, "paths": paths}


@pytest.fixture(scope="module")
def api() -> Iterator[tuple[str, list[Request]]]:
    """The stub's address, and the changes it was asked for."""
    requests: list[Request] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Recorder", (Api,), {"requests": requests}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def synthesized(cdk) -> Any:
    if not cdk.assembly.exists():
        cdk.run("synth", "--quiet", "--no-version-reporting")
    return cdk


def _asset(cdk: Any, construct: str) -> Path:
    """The file or folder of an asset of the Cluster stack, by the construct it belongs to."""
    files = json.loads((cdk.assembly / "ray-train-Cluster.assets.json").read_text())["files"]
    (found,) = [row["source"]["path"] for row in files.values() if construct in row["displayName"]]
    return cdk.assembly / found


@pytest.fixture(scope="module")
def tools(synthesized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the layer's kubectl, and scripts in place of `aws` and `helm`."""
    folder = tmp_path_factory.mktemp("tools")
    with zipfile.ZipFile(_asset(synthesized, "KubectlLayer/Code")) as layer:
        layer.extract("kubectl/kubectl", folder)
    (folder / "kubectl" / "kubectl").rename(folder / "kubectl-binary")
    (folder / "kubectl").rmdir()
    (folder / "kubectl-binary").rename(folder / "kubectl")
    # `aws eks update-kubeconfig --name NAME --kubeconfig FILE`
    (folder / "aws").write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "eks update-kubeconfig --name" ] || exit 1\n'
        'printf "%s" "apiVersion: v1\nkind: Config\ncurrent-context: c\n'
        "clusters: [{name: c, cluster: {server: '$API_URL'}}]\ncontexts: [{name: c, context: {cluster: c}}]\n"
        '" > "$6"\n'
    )
    # Chart repositories are on the internet: what Helm would be told is all there is to see.
    (folder / "helm").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$TEST_OUTDIR/helm-arguments"\n')
    for tool in folder.iterdir():
        tool.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def outdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the handler and the tools leave their files."""
    return tmp_path_factory.mktemp("handler")


@pytest.fixture(scope="module")
def handle(synthesized, tools: Path, api, outdir: Path) -> Callable[[str, dict[str, Any]], list[Request]]:
    """Runs the handler for one request of CloudFormation, as its Lambda would; returns what the API got."""
    url, requests = api
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    environment = {"PATH": path, "TEST_OUTDIR": str(outdir), "API_URL": url, "HOME": str(outdir)}

    def run(request_type: str, resource: dict[str, Any]) -> list[Request]:
        event = {
            "RequestType": request_type,
            "ResourceType": resource["Type"],
            "ResourceProperties": {key: _as_text(value) for key, value in resource["Properties"].items()},
        }
        before = len(requests)
        done = subprocess.run(
            [sys.executable, "-c", "import json, sys, index; index.handler(json.load(sys.stdin), None)"],
            input=json.dumps(event),
            cwd=_asset(synthesized, "KubectlProvider/Handler/Code"),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout
        return requests[before:]

    return run


@pytest.fixture(scope="module")
def manifests(synthesized) -> list[dict[str, Any]]:
    found = _resources(synthesized, "ray-train-Training", KUBECTL_RESOURCE)
    assert found
    return found


@pytest.fixture(scope="module")
def sent(manifests, handle) -> list[Request]:
    """What the API got when every manifest was created."""
    return [request for manifest in manifests for request in handle("Create", manifest)]


def _as_text(value: Any) -> Any:
    """CloudFormation hands every scalar over as text, and references resolved."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict) and "Fn::Join" in value:
        separator, parts = value["Fn::Join"]
        return separator.join(part if isinstance(part, str) else "resolved" for part in parts)
    return value if isinstance(value, str) else str(value)


def _resources(cdk: Any, stack: str, type_: str) -> list[dict[str, Any]]:
    return [row for row in cdk.template(stack)["Resources"].values() if row["Type"] == type_]


def _objects(resource: dict[str, Any]) -> list[dict[str, Any]]:
    return json.loads(_as_text(resource["Properties"]["Manifest"]))


def test_the_handler_sends_every_object_of_every_manifest_for_strict_validation(manifests, sent):
    assert {request.method for request in sent} == {"POST"}
    assert all(request.query["fieldValidation"] == ["Strict"] for request in sent)
    wanted = [each for manifest in manifests for each in _objects(manifest)]
    assert [_without_copy(request.body) for request in sent] == wanted


def _without_copy(body: dict[str, Any]) -> dict[str, Any]:
    """The object as sent, without the copy of itself that `kubectl apply` puts into an annotation."""
    metadata = dict(body["metadata"])
    annotations = dict(metadata.pop("annotations"))
    assert annotations.pop("kubectl.kubernetes.io/last-applied-configuration")
    return body | {"metadata": metadata | ({"annotations": annotations} if annotations else {})}


def test_what_is_sent_is_valid_by_kubernetes_own_schemas(sent):
    core = [request.body for request in sent if request.body["apiVersion"] != "ray.io/v1"]
    assert {body["kind"] for body in core} == {"Namespace", "ServiceAccount", "NetworkPolicy"}
    for body in core:
        kubernetes_validate.validate(body, "1.36", strict=True)


def test_the_handler_deletes_the_object_it_created(manifests, handle):
    (job,) = [manifest for manifest in manifests if _objects(manifest)[0]["kind"] == "RayJob"]
    (request,) = handle("Delete", job)
    name = _objects(job)[0]["metadata"]["name"]
    assert (request.method, request.path) == ("DELETE", f"/apis/ray.io/v1/namespaces/ray/rayjobs/{name}")


def test_helm_is_told_the_pinned_version_to_wait_and_our_values(synthesized, handle, outdir):
    charts = _resources(synthesized, "ray-train-Platform", HELM_RESOURCE)
    assert len(charts) == 3
    for chart in charts:
        properties = chart["Properties"]
        handle("Create", chart)
        words = (outdir / "helm-arguments").read_text().splitlines()
        assert words[:4] == ["upgrade", properties["Release"], properties["Chart"], "--install"]
        for flag, value in (("--repo", "Repository"), ("--version", "Version"), ("--namespace", "Namespace")):
            assert words[words.index(flag) + 1] == properties[value]
        assert "--wait" in words
        values = Path(words[words.index("--values") + 1]).read_text()
        assert json.loads(values) == json.loads(properties["Values"])
