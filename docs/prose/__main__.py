"""``python -m docs.prose [FILES]``: print what to rewrite; the exit code is 1 if anything is."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs.generated import generated_pages
from docs.prose.checks import (
    LONG_WORDS,
    Finding,
    LongSentence,
    long_sentences,
    too_long,
    too_many,
    wording,
)
from docs.prose.reference import public_docstrings
from docs.prose.text import Block, blocks_of_code, blocks_of_page
from docs.prose.vocabulary import VOCABULARY

ROOT = Path(__file__).parents[2]

PAGES = (
    "*.md",
    ".github/**/*.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "tests/cuda_stand_in/README.md",
)


def pages() -> Iterator[tuple[str, str]]:
    """Yield all pages, those made from code included: path from the root, and text."""
    for path in sorted({path for pattern in PAGES for path in ROOT.glob(pattern)}):
        yield path.relative_to(ROOT).as_posix(), path.read_text()
    yield from generated_pages(ROOT).items()


def code() -> Iterator[tuple[str, str]]:
    """Yield all files of the package: path from the root, and text."""
    for path in sorted((ROOT / "fxremat").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def words_table() -> str:
    """Return the words to avoid as a Markdown table, which CONTRIBUTING.md has."""
    rows = (f"| {entry.word} | {entry.instead} | {entry.why} |" for entry in VOCABULARY)
    return "\n".join(["| not | but | reason |", "|---|---|---|", *rows])


def check(
    texts: Sequence[tuple[str, list[Block]]],
) -> tuple[list[Finding], int, list[LongSentence]]:
    """Return what to rewrite of prose; the number of its sentences, and those that are long."""
    findings, count, long = list[Finding](), 0, list[LongSentence]()
    for file, blocks in texts:
        number, sentences = long_sentences(file, blocks)
        findings += wording(file, blocks)
        findings += too_long(sentences)
        count += number
        long += sentences
    return findings, count, long


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what to rewrite, and return 1 if anything is."""
    parser = argparse.ArgumentParser(prog="python -m docs.prose", description=__doc__)
    parser.add_argument("--long", action="store_true", help="list every long sentence")
    parser.add_argument("--words", action="store_true", help="print the words to avoid, and exit")
    parser.add_argument("files", nargs="*", help="Markdown and Python files; all by default")
    given = parser.parse_args(arguments)
    if given.words:
        print(words_table())
        return 0
    findings = list[Finding]()
    if given.files:
        named = [(name, Path(name).read_text()) for name in given.files]
        texts = [(name, blocks_of_page(text)) for name, text in named if name.endswith(".md")]
        sources = [(name, text) for name, text in named if name.endswith(".py")]
    else:
        texts = [(name, blocks_of_page(text)) for name, text in pages()]
        texts += public_docstrings(ROOT)
        sources = list(code())
    for name, text in sources:
        findings += wording(name, blocks_of_code(text), only_vocabulary=True)
    of_pages, count, long = check(texts)
    findings += of_pages
    for finding in sorted(set(findings), key=lambda finding: (finding.file, finding.line)):
        print(finding)
    for sentence in long if given.long else ():
        print(sentence)
    share = f"{len(long)} of {count} sentences have over {LONG_WORDS} words"
    if texts:
        print(f"{share} ({len(long) / max(count, 1):.1%})")
    return int(bool(findings) or too_many(len(long), count))


if __name__ == "__main__":
    raise SystemExit(main())
