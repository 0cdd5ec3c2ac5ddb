# For a newcomer: `make demo` and `make test`. Both make their own environment in .venv.
# `make docs` writes the site into site/, with an environment of its own in .venv-docs.
# `make test-works` trains with other libraries, in an environment that has them: .venv-works.
# `make test-cuda` needs no GPU: torch's CUDA build over a stand-in for the driver, in .venv-cuda.
# `make package` builds the wheel and the sdist into dist/, checks them, and runs them.
# `TORCH=2.15.0 make test` does so with another torch, in an environment of its own;
# `TORCH=newest` takes the newest release that pip finds, and `TORCH=nightly` also nightly builds.

PYTHON ?= python3
TORCH ?=
VENV := .venv$(TORCH:%=-torch-%)
PYTEST := OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2
PIP_INSTALL = -m pip install -qq --disable-pip-version-check
ifdef TORCH
CONSTRAINTS ?= $(VENV).txt
else
CONSTRAINTS ?= constraints.txt
endif

# An editable install has the version of the time that it was made. So it is made again where the
# commit is another tag than then, or the first one after a tag.
DESCRIBED := $(or $(shell git describe --tags --exact-match 2>/dev/null),after-$(shell \
	git describe --tags --abbrev=0 2>/dev/null))

ON_CUDA := STAND_IN_SMALL=1 tests/cuda_stand_in/run.sh .venv-cuda python -m pytest -n 2 \
	--dist loadfile -p cuda_stand_in_pytest

.PHONY: demo test test-slow test-works test-cuda test-cuda-slow lint format docs package package-extras clean

# One thread: on a busy machine, threads that wait for each other make step times meaningless.
demo: $(VENV)/ready
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m demo.train

test: $(VENV)/ready
	$(PYTEST) -m "not slow and not cuda"

test-slow: $(VENV)/ready
	$(PYTEST) -m "(slow or hypothesis) and not cuda" --hypothesis-profile=many

test-works: .venv-works/ready
	OMP_NUM_THREADS=1 .venv-works/bin/python -m pytest -n 2 tests/works_with

test-cuda: .venv-cuda/ready
	test -e .venv-cuda/unavailable || $(ON_CUDA) -m "cuda and not slow and not gpu"

test-cuda-slow: .venv-cuda/ready
	test -e .venv-cuda/unavailable || $(ON_CUDA) -m "cuda and not gpu"

lint: $(VENV)/ready-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m docs.prose

format: $(VENV)/ready-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/python -m docs.generated
	$(VENV)/bin/python -m fxremat.passes > docs/passes.md

docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

package: .venv-package/ready
	.venv-package/bin/python .ci/package

package-extras: .venv-package/ready
	.venv-package/bin/python .ci/package --extras

clean:
	rm -rf .venv .venv-cuda .venv-docs .venv-package .venv-torch-* .venv-works build dist site

# Made again when what it is made of changes, so that a second run is quick.
$(VENV)/ready: pyproject.toml $(CONSTRAINTS) $(VENV)/at-$(DESCRIBED)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[test]'
	touch $@

$(VENV)/at-%:
	mkdir -p $(VENV)
	rm -f $(VENV)/at-*
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(VENV)/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[dev]'
	touch $@

REQUIREMENT_newest := torch
REQUIREMENT_nightly := torch>=0.dev0
.venv-torch-%.txt:
	echo '$(or $(REQUIREMENT_$*),torch==$*)' >$@

.venv-works/ready: pyproject.toml $(CONSTRAINTS)
	test -x .venv-works/bin/python || $(PYTHON) -m venv .venv-works
	.venv-works/bin/python $(PIP_INSTALL) -c $(CONSTRAINTS) -e '.[works]'
	touch $@

.venv-package/ready: .ci/package-requirements.txt
	test -x .venv-package/bin/python || $(PYTHON) -m venv .venv-package
	.venv-package/bin/python $(PIP_INSTALL) -r $<
	touch $@

.venv-cuda/ready: constraints.txt $(wildcard tests/cuda_stand_in/*)
	PYTHON=$(PYTHON) tests/cuda_stand_in/setup.sh .venv-cuda
	test -e .venv-cuda/unavailable || touch $@

.venv-docs/ready: docs/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(PIP_INSTALL) -r $<
	touch $@
