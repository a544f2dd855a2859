"""What can be destroyed alone, and in which order the rest goes (docs/decisions/0004 says why)."""

import json

import pytest

STACKS = ["Network", "Cluster", "Nodes", "Platform", "Training"]


def _dependencies(assembly):
    """Stack -> the stacks it needs, as the CDK CLI reads them."""
    artifacts = json.loads((assembly.folder / "manifest.json").read_text())["artifacts"]
    names = {f"ray-train-{stack}": stack for stack in STACKS}
    return {
        names[id_]: {names[other] for other in artifact.get("dependencies", []) if other in names}
        for id_, artifact in artifacts.items()
        if id_ in names
    }


@pytest.mark.parametrize("variant", ["default", "reserved", "block"])
def test_nothing_needs_the_gpu_nodes_so_they_can_be_destroyed_alone(request, variant):
    """`cdk destroy X` destroys whatever depends on X as well, and an export in use cannot be deleted."""
    assembly = request.getfixturevalue(variant)
    assert [name for name, needs in _dependencies(assembly).items() if "Nodes" in needs] == []
    outputs = assembly.templates["Nodes"].get("Outputs", {}).values()
    assert not [output for output in outputs if "Export" in output]
    assert "ray-train-Nodes" not in str([assembly.templates[name] for name in STACKS if name != "Nodes"])


def test_training_goes_before_the_operator_and_both_before_the_cluster(default):
    needs = _dependencies(default)
    assert "Platform" in needs["Training"]
    assert "Cluster" in needs["Platform"]
    assert "Cluster" in needs["Training"]
    assert "Network" in needs["Cluster"]


def test_the_right_to_use_the_cluster_outlives_charts_and_manifests(default):
    """A chart whose access entry is gone cannot be uninstalled, and CDK's handler hides the error."""
    assert default.resources("Cluster", "AWS::EKS::AccessEntry")
    for stack in ("Platform", "Training"):
        assert not default.resources(stack, "AWS::EKS::AccessEntry")


@pytest.mark.parametrize("variant", ["default", "reserved", "block"])
def test_every_log_expires_and_goes_with_its_stack(request, variant):
    """A function that names no log group makes one at its first run, which nothing ever deletes."""
    assembly = request.getfixturevalue(variant)
    functions = list(assembly.all("AWS::Lambda::Function"))
    assert functions
    assert all("LogGroup" in function["Properties"]["LoggingConfig"] for function in functions)
    for group in assembly.all("AWS::Logs::LogGroup"):
        assert group["Properties"]["RetentionInDays"] <= 90
        assert group["DeletionPolicy"] == "Delete"


def test_nothing_but_the_results_is_kept_on_destroy(default):
    kept = [
        (stack, name)
        for stack in STACKS
        for name, resource in default.templates[stack]["Resources"].items()
        if resource.get("DeletionPolicy", "Delete") not in ("Delete",)
    ]
    assert [stack for stack, _ in kept] == ["Training"]
    assert kept[0][1].startswith("Results")
