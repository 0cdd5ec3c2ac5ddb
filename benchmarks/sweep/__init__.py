"""A sweep over torch's own databases of operators and modules: ``python -m benchmarks.sweep``."""
