"""``python -m fxremat``: the command."""

from __future__ import annotations

import sys

from fxremat.command import main

sys.exit(main())
