"""The pages that are made from the code, and are no files of the repository."""

from pathlib import Path

from constants import constants_page  # next to this file
from option_table import options_page


def generated_pages(root: Path) -> dict[str, str]:
    """Return each page by its path from the root of the repository."""
    return {"docs/constants.md": constants_page(root), "docs/options.md": options_page(root)}
