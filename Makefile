# For a newcomer: `make demo` and `make test`. Both make their own environment in .venv.

PYTHON ?= python3
PYTEST := OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

.PHONY: demo test test-slow lint format clean

# One thread: on a busy machine, threads that wait for each other make step times meaningless.
demo: .venv/ready
	OMP_NUM_THREADS=1 .venv/bin/python -m demo.train

test: .venv/ready
	$(PYTEST) -m "not slow and not cuda"

test-slow: .venv/ready
	$(PYTEST) -m "(slow or hypothesis) and not cuda" --hypothesis-profile=many

lint: .venv/ready-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/ready-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv

# Made anew when what it is made of changes, so that a second run is quick.
.venv/ready: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv/ready-dev: .venv/ready
	.venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
