"""The options of :func:`fxremat.compile`: one table, and the values that options may have.

Nothing in this package needs torch, so the command can print its help without loading it.
"""
