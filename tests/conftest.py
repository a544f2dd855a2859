"""Environment of every test: the CDK without its banner, and without its validation."""

import os

# The names are read when the first test imports aws_cdk, which starts a Node process.
# jsii prints a banner under Node 20; the value is a list of major versions to be silent about.
os.environ["JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION"] = "20"
# Validation takes 2 s a synthesis. tests/stacks/test_validation.py runs it, once.
os.environ["CDK_VALIDATION"] = "false"
