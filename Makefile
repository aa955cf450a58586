# Everything that is done with this checkout. `make` alone lists it. Needs Python 3.11 or newer with venv and pip.

PYTHON ?= python3
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

export RAY_AUTH_MODE := token
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup demo check test lint types pages style bench chaos proto clean

help:               ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: .venv/.ready ## make the environment in .venv, with the versions of constraints.txt

# One call, and torch named with its version: so pip takes a CPU build where one is offered beside the registry's.
# pip would compile the modules one after the other; a few that are written for another Python never compile.
# What numba compiles is kept: otherwise each of the first processes that load it would compile it, all at the same time.
.venv/.ready: pyproject.toml constraints.txt
	@echo 'installing into .venv; this takes some minutes'
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch==$(TORCH) -e '.[dev]'
	.venv/bin/python -m compileall -qq -j 0 .venv/lib hypha_ray jobs tools tests/support || true
	.venv/bin/python -c 'from hypha_ray.kernels import compiled_copy, compiled_outer, compiled_patches' || true
	touch $@

demo: setup         ## prepare data, start Ray here, submit a small training job, show its results
	bash jobs/demo.sh

check: setup        ## lint, and the tests that start no Ray and take seconds
	$(MAKE) lint
	python -m pytest tests/unit -m 'not slow' -n 3 --dist loadfile

test: setup         ## run the whole test suite, two files at a time and a third in their gaps; SHORT=1: without long tests
	python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(if $(SHORT),--short)

lint: setup         ## ruff, mypy --strict, import contracts, links of the documentation
	$(MAKE) --no-print-directory -j 2 types pages style

types: setup        ## mypy --strict
	mypy

pages: setup        ## build the documentation, with its links checked
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

style: setup        ## ruff, import contracts
	ruff check .
	ruff format --check .
	lint-imports

bench: setup        ## measure the benchmark table
	python jobs/bench.py

chaos: setup        ## kill parts of a running job and measure what it costs
	python jobs/chaos.py --mean-rounds-between-kills 2 --rounds 20 --roles worker,server,shard,scheduler,driver

proto: setup        ## generate the bridge's protobuf code
	python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. hypha_ray/bridge/bridge.proto

clean:              ## remove the environment, all caches, and the demo's data
	rm -rf .venv .demo .site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find hypha_ray jobs tools tests -name __pycache__ -type d -prune -exec rm -rf {} +
