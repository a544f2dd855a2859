"""What changes in the templates is seen in review. `make snapshots` accepts it."""

import pytest
from syrupy.extensions.json import JSONSnapshotExtension


@pytest.mark.parametrize("stack", ["Network", "Cluster", "Nodes", "Platform", "Training"])
def test_template_as_reviewed(default, readable, snapshot, stack):
    assert readable(default.templates[stack]) == snapshot(extension_class=JSONSnapshotExtension)


@pytest.mark.parametrize("variant", ["reserved", "block"])
def test_nodes_template_as_reviewed(request, readable, snapshot, variant):
    template = request.getfixturevalue(variant).templates["Nodes"]
    assert readable(template) == snapshot(extension_class=JSONSnapshotExtension)


def test_a_snapshot_holds_no_hash_that_changes_with_every_edit_of_the_code(default, readable):
    text = str([readable(template) for template in default.templates.values()])
    digest = default.object("RayJob")["metadata"]["name"].rpartition("-")[2]
    assert len(digest) == 10
    assert digest not in text
    assert "<code digest>" in text
