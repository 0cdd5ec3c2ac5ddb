"""Whether what the solvers' exhaustive tests read has changed of late.

The property tests of ``tests/solvers`` and ``tests/reference`` compare solvers with exhaustive
searches of random problems. They read the files of ``READ`` and no others, so while these stay the
same, the tests show nothing new, and ``tests/conftest.py`` marks them ``slow``. They run while the
work tree differs from its commit in one of the files, and for ``DAYS`` days and ``COMMITS`` commits
after a commit that changed one. Where git cannot say, as without a history, they run.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent

FOLDERS = ("tests/solvers", "tests/reference")
"""The folders whose property tests these are."""

READ = (
    "fxremat/solvers", "fxremat/ir", "fxremat/jit.py", *FOLDERS, "tests/examples.py",
    "tests/joins.py", "tests/paper_terms.py", "tests/problems.py", "tests/strategies.py",
)  # fmt: skip
"""The files and folders that the property tests read."""

DAYS, COMMITS = 7, 50
"""How long after a change the tests run: as long as either says. A merge counts as one commit, made
when it was merged, so a change that is pushed or merged late is tested, too."""


def have_changed(root: Path = ROOT) -> bool:
    """Return whether a file of ``READ`` has changed of late, or git cannot say."""
    try:
        if _git(root, "status", "--porcelain", "--", *READ):
            return True
        # Of a shallow clone, the first commit counts as the one that made every file.
        changed = _git(root, "log", "-1", "-m", "--first-parent", "--format=%H %ct", "--", *READ)
        if not changed:
            return True
        commit, changed_s = changed.split()
        since = int(_git(root, "rev-list", "--count", "--first-parent", f"{commit}..HEAD"))
        now_s = _git(root, "log", "-1", "--format=%ct")
    except (OSError, subprocess.CalledProcessError):
        return True
    return since < COMMITS or int(now_s) - int(changed_s) < DAYS * 24 * 3600


def _git(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        ["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
