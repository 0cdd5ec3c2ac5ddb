"""How long the solvers take, a section a family."""
