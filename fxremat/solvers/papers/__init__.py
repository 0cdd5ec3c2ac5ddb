"""Solvers that ``compile`` does not load: ``fxremat.solve`` and generators reach them by name."""
