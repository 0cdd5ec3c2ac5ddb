"""Solvers take numbers and return schedules. None imports torch; ``named`` lists all of them."""
