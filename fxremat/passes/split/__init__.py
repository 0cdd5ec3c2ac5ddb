"""Compute runs of operations for some rows at a time."""
