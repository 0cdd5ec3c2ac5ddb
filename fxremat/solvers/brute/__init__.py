"""Exhaustive searches, written from the models alone; the other solvers are held against them."""

from fxremat.solvers.brute.chain import solve

__all__ = ["solve"]
