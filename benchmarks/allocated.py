"""What torch's CPU allocator holds, counted below torch: ``scripts/allocated.c``, preloaded.

Who measures builds the library (:func:`built`), starts a process with ``LD_PRELOAD`` set to it, and
that process counts (:class:`Allocated`). Nothing of fxremat takes part.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "scripts" / "allocated.c"


def built(folder: Path) -> Path:
    """Compile the library into ``folder`` with gcc."""
    library = folder / "allocated.so"
    flags = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, str(SOURCE), "-o", str(library), "-ldl"], check=True)
    return library


class Allocated:
    """The counter of this process, which was started with the library preloaded.

    Raises:
        RuntimeError: it was not.
    """

    def __init__(self) -> None:
        import torch  # its library must be there before the counter looks for it

        library = ctypes.CDLL(None)
        if not hasattr(library, "allocated_begin"):
            raise RuntimeError(
                f"{SOURCE.name} is not preloaded: LD_PRELOAD={os.environ.get('LD_PRELOAD')!r}"
            )
        library.allocated_now.restype = library.allocated_most.restype = ctypes.c_int64
        if not library.allocated_begin():
            raise RuntimeError(f"the allocator of torch {torch.__version__} was not found")
        self._library = library

    @property
    def now_bytes(self) -> int:
        """Held now, of what was allocated since the counter began."""
        return int(self._library.allocated_now())

    @property
    def most_bytes(self) -> int:
        """Held at most since the last :meth:`mark`."""
        return int(self._library.allocated_most())

    def mark(self) -> None:
        """Begin a new time over which :attr:`most_bytes` is taken."""
        self._library.allocated_mark()
