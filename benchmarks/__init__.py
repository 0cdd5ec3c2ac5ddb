"""Scripts that print a table and write JSON; they measure and plan anew each time."""

import os

os.environ.setdefault("FXREMAT_CACHE", "0")
