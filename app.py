"""Reads the settings, builds the stacks, writes the templates. Run by the CDK CLI."""

from __future__ import annotations

import sys

import aws_cdk as cdk

from settings import SettingsError, load
from stacks.build import build


def main() -> int:
    """Synthesizes into the folder that the CDK CLI names.

    Returns:
        Exit code: 1 if the settings cannot be used.
    """
    app = cdk.App()
    try:
        build(app, load(app.node.get_all_context()))
    except SettingsError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
