"""Replay a schedule: is it valid, how much memory does it need, how long does it take?

Written from the models alone. It shares no code with the solvers, so that one can be held
against the other.
"""

from tests.reference.simulate.lanes import check, simulate

__all__ = ["check", "simulate"]
