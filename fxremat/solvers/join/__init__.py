"""Recomputation of joins: independent branches that meet in a trunk."""

from fxremat.solvers.join.general import JoinPlans, least_budget, solve

__all__ = ["JoinPlans", "least_budget", "solve"]
