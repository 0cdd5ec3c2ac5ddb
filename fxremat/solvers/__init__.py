"""Numbers in, schedule out. Nothing here imports torch; ``named`` has all solvers."""
