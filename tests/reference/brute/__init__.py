"""Exhaustive searches, written from the models alone; the other solvers are held against them."""

from tests.reference.brute.chain import solve

__all__ = ["solve"]
