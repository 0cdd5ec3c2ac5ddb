"""Offloading without recomputation: what to keep on the host, and when to move it.

Every forward keeps everything. ``line`` has the model, and ``phases`` computes the times.
"""
