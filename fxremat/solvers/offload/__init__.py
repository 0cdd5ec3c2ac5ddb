"""Offloading without recomputation: what to keep on the host, and when it moves.

Chains whose forwards keep everything; see ``line`` for the model and ``phases`` for the times.
"""
