"""Exact solvers of small problems, using OR-Tools CP-SAT, which is imported with them."""

from fxremat.solvers.papers.cpsat import offload
from fxremat.solvers.papers.cpsat.chain import solve

__all__ = ["offload", "solve"]
