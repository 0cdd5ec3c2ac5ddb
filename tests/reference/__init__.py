"""What solvers are held against, written from their models alone: it shares no code with them.

``brute`` searches small problems exhaustively; ``simulate`` replays a schedule: is it valid, how
much memory does it need, how long does it take?
"""
