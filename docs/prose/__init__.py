"""The prose linter: ``python -m docs.prose [FILES]``.

It reads the pages, the docstrings of the reference, and what the code says in comments,
docstrings and messages. proselint is its engine; ``vocabulary.py`` has the words to avoid.
"""
