"""Write golden plans anew; see the package."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.golden import CASES, FOLDER, plans_of, text_of, whole


def main() -> None:
    """Plan each case, and write what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all of them if none is named")
    parser.add_argument("--write", action="store_true", help="what tests expect")
    parser.add_argument("--whole", type=Path, metavar="FOLDER", help="plans as JSON, to compare")
    asked = parser.parse_args()
    for case in asked.cases or CASES:
        plans = plans_of(case, record=asked.write)
        text = text_of(plans)
        file = FOLDER / "plans" / f"{case}.txt"
        same = file.exists() and file.read_text() == text
        print(f"{case}: {'the same' if same else 'differs'}", flush=True)
        if asked.write:
            file.write_text(text)
        if asked.whole:
            asked.whole.mkdir(parents=True, exist_ok=True)
            data = {name: json.loads(whole(plan)) for name, plan in plans.items()}
            (asked.whole / f"{case}.json").write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
