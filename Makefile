# For a newcomer: `make demo` and `make test`. Both make their own environment in .venv.
# `make docs` writes the site into site/, with an environment of its own in .venv-docs.
# `make test-works` trains with other libraries, in an environment that has them: .venv-works.
# `make test-cuda` needs no GPU: torch's CUDA build over a stand-in for the driver, in .venv-cuda.

PYTHON ?= python3
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

ON_CUDA := STAND_IN_SMALL=1 tests/cuda_stand_in/run.sh .venv-cuda python -m pytest -n 2 \
	--dist loadfile -p cuda_stand_in_pytest

.PHONY: demo test test-slow test-works test-cuda test-cuda-slow lint format docs clean

# One thread: on a busy machine, threads that wait for each other make step times meaningless.
demo: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python -m demo.train

test: .venv/ready
	$(PYTEST) -m "not slow and not cuda"

test-slow: .venv/ready
	$(PYTEST) -m "(slow or hypothesis) and not cuda" --hypothesis-profile=many

test-works: .venv-works/ready
	OMP_NUM_THREADS=1 .venv-works/bin/python -m pytest -n 2 tests/works_with

test-cuda: .venv-cuda/ready
	test -e .venv-cuda/unavailable || $(ON_CUDA) -m "cuda and not slow and not gpu"

test-cuda-slow: .venv-cuda/ready
	test -e .venv-cuda/unavailable || $(ON_CUDA) -m "cuda and not gpu"

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m docs.prose

format: .venv/ready-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/python -m docs.generated
	.venv/bin/python -m fxremat.passes > docs/passes.md

docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

clean:
	rm -rf .venv .venv-cuda .venv-docs .venv-works site

# Made again when what it is made of changes, so that a second run is quick.
.venv/ready: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv/ready-dev: .venv/ready
	.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.venv-works/ready: pyproject.toml constraints.txt
	test -x .venv-works/bin/python || $(PYTHON) -m venv .venv-works
	.venv-works/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[works]'
	touch $@

.venv-cuda/ready: constraints.txt $(wildcard tests/cuda_stand_in/*)
	PYTHON=$(PYTHON) tests/cuda_stand_in/setup.sh .venv-cuda
	test -e .venv-cuda/unavailable || touch $@

.venv-docs/ready: docs/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -qq --disable-pip-version-check -r $<
	touch $@
