"""Small problems solved exactly by OR-Tools CP-SAT; it is loaded with the first of them."""

from fxremat.solvers.cpsat import offload
from fxremat.solvers.cpsat.chain import solve

__all__ = ["offload", "solve"]
