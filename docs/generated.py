"""The pages that are made from the code.

Pages for users are files of the repository: ``python -m docs.generated`` writes them, and a test
compares them with the code. The page of constants exists only on the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where mkdocs looks for the files next to this one

from constants import constants_page
from option_table import options_page

CONSTANTS = "docs/reference/constants.md"


def generated_pages(root: Path) -> dict[str, str]:
    """Return the pages that are no files, by their paths from the root of the repository."""
    return {CONSTANTS: constants_page(root)}


def generated_files(root: Path) -> dict[str, str]:
    """Return the pages that are files, by their paths from the root. The package is imported."""
    from command_page import command_page  # noqa: PLC0415

    from fxremat import command  # noqa: PLC0415

    return {
        "docs/reference/options.md": options_page(root),
        "docs/reference/command.md": command_page(command._parser()),
    }


if __name__ == "__main__":
    ROOT = Path(__file__).parents[1]
    for name, content in generated_files(ROOT).items():
        (ROOT / name).write_text(content)
