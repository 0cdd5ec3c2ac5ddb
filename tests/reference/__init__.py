"""What solvers and evaluations are held against, written from their models alone.

It shares no code with them. ``brute`` searches small problems exhaustively; ``simulate`` replays a
schedule: is it valid, how much memory does it need, how long does it take? ``plain_*`` are
recurrences, sweeps and rules once more, slow and short.
"""
