"""How many random examples a property is tried on: few each time, thousands in the slow suite.

The few are the same ones each time, so that a change fails for what it changes. While what the
solvers' exhaustive tests read changes (``tests/references.py``), there are some more.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.references import have_changed

FEW, SOME, MANY = 20, 50, 2500


def register_profiles() -> None:
    """Register ``few``, ``some`` and ``many``, and load ``few`` or, after a change, ``some``."""
    relaxed = settings(deadline=None, suppress_health_check=list(HealthCheck))
    settings.register_profile("few", relaxed, max_examples=FEW, derandomize=True)
    settings.register_profile("some", relaxed, max_examples=SOME, derandomize=True)
    settings.register_profile("many", relaxed, max_examples=MANY)
    settings.load_profile("some" if have_changed() else "few")


def examples(share: float) -> settings:
    """``share`` of the profile's number, where one example takes long or a few show little."""
    return settings(max_examples=max(1, round(share * settings().max_examples)))
