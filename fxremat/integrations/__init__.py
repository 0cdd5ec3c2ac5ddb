"""fxremat in trainers of others: transformers, Lightning, Accelerate.

Each module needs its library, ``pip install 'fxremat[transformers]'`` and so on; none is loaded
before it is imported.
"""
