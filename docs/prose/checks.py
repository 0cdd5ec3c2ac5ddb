"""What is checked of prose: words to avoid, proselint's checks, and lengths of sentences."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckFlags
from proselint.registry.checks.engine import Fancy
from proselint.registry.checks.types import ExistenceSimple
from proselint.tools import LintFile

from docs.prose.text import CODE, Block, sentences, words
from docs.prose.vocabulary import VOCABULARY

MAX_WORDS = 45
"""The most words of a sentence."""

LONG_WORDS = 30
"""A sentence of more words is long."""

LONG_SHARE = 0.03
"""The most of all sentences that may be long."""

VOCABULARY_PATH = "fxremat.vocabulary"

NOT_OF_PROSELINT = (
    "dates_times.dates.decade_apostrophes",  # reads "ResNet-50's" as a decade
    "misc.currency",
    "misc.metadiscourse",
    "misc.phrasal_adjectives.ly",  # "multiply-adds"
    "restricted",
    "typography.symbols.curly_quotes",  # the sources are ASCII
    "typography.symbols.multiplication",  # reads "4x2048" as a product
    "typography.symbols.trademark",
    "weasel_words.very",  # an entry of the vocabulary
)
"""Checks of proselint that are wrong about pages on software."""

_IN_A_LIST = re.compile(rf"\d|\b{CODE}\b")
"""What may be repeated: figures, and code."""

_BETWEEN = "\n¶\n"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to rewrite: where it is, and what to do.

    Attributes:
        file: its path from the repository's root.
        line: counted from 1.
        message: the word, and what to write in its place.
    """

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class LongSentence:
    """A sentence of more than ``LONG_WORDS`` words."""

    file: str
    line: int
    words: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words} words: {self.text[:60]}..."


@cache
def _register() -> None:
    """Register proselint's checks, and one check for each entry of the vocabulary."""
    ours = [
        Check(
            check_type=ExistenceSimple(pattern=entry.pattern),
            engine=Fancy(),
            path=f"{VOCABULARY_PATH}.{index}",
            message=f"'{{}}': write instead: {entry.instead}. {entry.why}",
            flags=CheckFlags(allow_quotes=True),
        )
        for index, entry in enumerate(VOCABULARY)
    ]
    CheckRegistry().register_many((*__register__, *ours))


def wording(file: str, blocks: Iterable[Block], *, only_vocabulary: bool = False) -> list[Finding]:
    """Return what the words of blocks should be replaced with."""
    _register()
    blocks = list(blocks)
    if not blocks:
        return []
    starts, text = list[int](), ""
    for block in blocks:
        starts.append(text.count("\n") + 1)
        text += block.text.strip("\n") + _BETWEEN

    def line_of(position: int) -> int:
        line = text.count("\n", 0, max(position - 1, 0)) + 1  # proselint puts a line before it
        index = bisect_right(starts, line) - 1
        return blocks[index].line + line - starts[index]

    checks = {VOCABULARY_PATH: True}
    if not only_vocabulary:
        checks |= dict.fromkeys(NOT_OF_PROSELINT, False) | DEFAULT["checks"]
    results = LintFile(file, text).lint(Config(max_errors=10**6, checks=checks))
    findings = [result.check_result for result in results]
    return [
        Finding(file, line_of(found.span[0] + 1), " ".join(found.message.split()))
        for found in findings
        if found.check_path != "lexical_illusions" or not _IN_A_LIST.search(found.message)
    ]


def long_sentences(file: str, blocks: Iterable[Block]) -> tuple[int, list[LongSentence]]:
    """Return the number of sentences, and those that are long."""
    everything = [found for block in blocks for found in sentences(block)]
    counted = ((line, words(text), text) for line, text in everything)
    return len(everything), [LongSentence(file, *s) for s in counted if s[1] > LONG_WORDS]


def too_long(sentences: Iterable[LongSentence]) -> Iterator[Finding]:
    """Yield the sentences that no page may have."""
    for sentence in sentences:
        if sentence.words > MAX_WORDS:
            text = f"'{sentence.text[:60]}...' has {sentence.words} words: at most {MAX_WORDS}"
            yield Finding(sentence.file, sentence.line, text)


def too_many(long: int, count: int) -> bool:
    """Return whether more of ``count`` sentences are long than may be; one always may."""
    return long > max(1, LONG_SHARE * count)
