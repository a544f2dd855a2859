# Every target sets itself up: virtual environment, Python packages, CDK CLI. A second run installs nothing.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
export PATH := $(CURDIR)/$(VENV)/bin:$(CURDIR)/node_modules/.bin:$(PATH)
# jsii, on which aws-cdk-lib runs, prints a banner at every start under Node 20, which still works.
export JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION := 20

PYTHON_READY := $(VENV)/.installed
NODE_READY := node_modules/.installed
SETUP := $(PYTHON_READY) $(NODE_READY)

.DEFAULT_GOAL := help
.PHONY: help demo test lint synth render snapshots deploy-local clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

demo: $(SETUP) ## Synthesize the stacks, then run the RayJob's own command line on a local Ray cluster
	@$(PY) demo.py

# Two at a time: much of the time goes into waiting for Ray and the CDK to start. A file stays in one process,
# so that what its tests share is made once.
test: lint ## Run every check and test
	@$(PY) -m pytest -n 2 --dist loadfile

lint: $(SETUP) ## Style, and who may import whom
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/lint-imports --no-cache
	@$(PY) -m k8s.render --check
	@$(PY) -m benchmarks.summary --check

synth: $(SETUP) ## Write the CloudFormation templates to cdk.out/
	@cdk synth --quiet

render: $(SETUP) ## Rewrite k8s/rendered/ from the settings in cdk.json
	@$(PY) -m k8s.render

snapshots: $(SETUP) ## Accept the templates as they are now
	@$(PY) -m pytest tests/stacks --snapshot-update

deploy-local: $(SETUP) ## Deploy, change, redeploy and destroy against a stand-in for AWS on loopback
	@$(PY) -m pytest tests/deploy

clean: ## Remove everything that was installed or generated
	rm -rf $(VENV) node_modules cdk.out .pytest_cache .hypothesis .ruff_cache

$(PYTHON_READY): requirements.txt requirements-cdk.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: Python 3.11 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; PyTorch makes this take minutes on a cold cache)"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(NODE_READY): package.json package-lock.json
	@node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null || \
	  { echo "error: Node.js 20 or newer is needed for the CDK CLI; 'node' is $$(node --version 2>/dev/null || echo missing)" >&2; exit 1; }
	@npm ci --silent --no-audit --no-fund
	@touch $@
