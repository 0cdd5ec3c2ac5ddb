"""``python -m fxremat.passes``: print the page of all passes."""

from __future__ import annotations

from fxremat.passes.pipeline import passes_page

print(passes_page())
