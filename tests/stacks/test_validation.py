"""Rules of others: CDK's own validation, cdk-nag (AwsSolutions), cfn-lint."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A process of its own, since validation is off in this one. The canary is a bucket that cdk-nag must object
# to: without a finding, a plugin that never ran would look like a clean one.
SYNTHESIZE = """
import contextlib, json, sys
import aws_cdk as cdk
from cdk_nag import AwsSolutionsChecks
from settings import load
from stacks.build import build

for context, folder in json.loads(sys.argv[1]):
    app = cdk.App(context=context, outdir=folder)
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    build(app, load(context))
    cdk.aws_s3.Bucket(cdk.Stack(app, "Canary"), "Bucket")
    with contextlib.suppress(Exception):  # the canary's findings fail the synthesis
        app.synth()
"""

EVERYTHING_ON = {
    "image_pull_through_cache": True,
    "admin_role_arns": "arn:aws:iam::123456789012:role/Admin",
    "api_public_cidrs": "192.0.2.0/24",
    "keep_bucket": False,
}


def _findings(folder: Path) -> list[str]:
    report = json.loads((folder / "validation-report.json").read_text())
    return [
        f"{plugin['pluginName']} {violation['ruleName']} {construct['constructPath']}"
        for plugin in report["pluginReports"]
        for violation in plugin.get("violations", [])
        for construct in violation["violatingConstructs"]
    ]


def test_neither_cdk_nor_cdk_nag_has_an_unexplained_finding(tmp_path):
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    folders = {tmp_path / "default": context, tmp_path / "everything": context | EVERYTHING_ON}
    work = json.dumps([(context, str(folder)) for folder, context in folders.items()])
    environment = {name: value for name, value in os.environ.items() if name != "CDK_VALIDATION"}
    done = subprocess.run(
        [sys.executable, "-c", SYNTHESIZE, work],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for folder in folders:
        findings = _findings(folder)
        assert "AwsSolutions AwsSolutions-S1 Canary/Bucket/Resource" in findings
        assert [finding for finding in findings if " Canary/" not in finding] == []


def test_cfn_lint_finds_nothing_in_any_variant(default, reserved, block):
    templates = [path for each in (default, reserved, block) for path in each.folder.glob("*.template.json")]
    assert len(templates) == 15
    lint = str(Path(sys.executable).with_name("cfn-lint"))  # .cfnlintrc says what is left out, and why
    done = subprocess.run([lint, *map(str, templates)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
