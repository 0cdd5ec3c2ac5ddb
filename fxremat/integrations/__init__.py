"""Integrations with Transformers, Lightning and Accelerate, and with torch.compile.

Each module requires its library, as in ``pip install 'fxremat[transformers]'``, and loads it only
when it is imported.
"""
