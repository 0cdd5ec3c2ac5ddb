"""``fxremat explain CODE``: what an error or warning means, and what to do about it."""

from __future__ import annotations

import argparse
import json

from fxremat.diagnostics.explain import as_data, as_text, diagnostic


def explain(asked: argparse.Namespace) -> int:
    """Print what is written about a code, and return 0.

    Raises:
        ArgumentError: there is no such code.
    """
    entry = diagnostic(asked.source)
    print(json.dumps(as_data(entry), indent=2) if asked.json else as_text(entry), end="")
    if asked.json:
        print()
    return 0
