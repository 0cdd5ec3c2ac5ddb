"""fxremat in trainers of others: transformers, Lightning, Accelerate; and in torch.compile.

Each module of a trainer needs its library, ``pip install 'fxremat[transformers]'`` and so on; none
is loaded before it is imported.
"""
