"""Runs of operations that are computed for some rows at a time."""
