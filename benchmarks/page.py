"""A plan as text, as in README, and as the picture of its page in docs/how-to/read-a-plan.md.

Run: python -m benchmarks.page [model] [--budget 0.5] [--to docs/page.png | --text]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.steps import entry_of, planned


def photograph(page: Path, picture: Path) -> None:
    """Open a page without a screen and keep what is seen."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        sys.exit("no chromium is installed: the page is looked at with that")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
            "--hide-scrollbars", "--window-size=1200,1400",
            f"--screenshot={picture.resolve()}", page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="gpt16")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--to", type=Path, default=Path("docs/page.png"))
    parser.add_argument("--text", action="store_true", help="print the plan, without a browser")
    options = parser.parse_args()
    step, compiled = planned(entry_of(options.model), options.budget)
    for _ in range(3):
        step.run()  # what they take is shown next to what was predicted
    if options.text:
        compiled.plan.explain()
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plan.html"
        compiled.plan.save_html(page)
        photograph(page, options.to)
    print(f"wrote {options.to}")


if __name__ == "__main__":
    main()
