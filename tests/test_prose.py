"""The prose linter flags the words to avoid, and all that we publish passes it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("proselint", reason="of the dev extra: make lint installs it")

from docs.prose.__main__ import ROOT, main
from docs.prose.checks import long_sentences, too_long, too_many, wording
from docs.prose.text import (
    Block,
    blocks_of_code,
    blocks_of_docstring,
    blocks_of_page,
    sentences,
    words,
)
from docs.prose.vocabulary import VOCABULARY, Entry


def flagged(page: str) -> list[str]:
    return [found.message for found in wording("page.md", blocks_of_page(page))]


@pytest.mark.parametrize("entry", VOCABULARY, ids=lambda entry: entry.word)
def test_each_entry_is_flagged_and_its_allowed_uses_are_not(entry: Entry) -> None:
    for sentence in entry.flagged:
        (message, *_) = flagged(f"The plan is printed. {sentence}")
        assert entry.instead in message
    for sentence in entry.allowed:
        assert not flagged(f"The plan is printed. {sentence}"), sentence


def test_the_end_of_a_cell_ends_a_sentence() -> None:
    page = "| a loop of its own | a loop |\n|---|---|\n| a loop of its own | a loop |\n"
    assert [found.line for found in wording("x", blocks_of_page(page))] == [1, 3]


def test_a_finding_names_file_line_word_and_replacement() -> None:
    page = "# Plans\n\nOne line.\nIt is\nmeasured anew.\n"
    (found,) = wording("docs/plans.md", blocks_of_page(page))
    assert str(found).startswith("docs/plans.md:5: 'anew': write instead: again.")


def test_the_lines_are_those_of_tables_lists_and_quotes() -> None:
    page = "| a | b |\n|---|---|\n| fine | it is\tanew |\n\n* an item\n* anew\n\n> anew\n"
    assert [found.line for found in wording("x", blocks_of_page(page))] == [3, 6, 8]


@pytest.mark.parametrize(
    "page",
    [
        "```python\ntold = anew\n```\n",
        "A list:\n\n    told = anew\n",
        "It calls `told(anew)` once.\n",
        "[Plans](https://example.org/told/anew) are printed.\n",
        "See https://example.org/told?anew=1 first.\n",
        "<!-- told -->\n\nA plan.\n",
        "<!-- prose: off -->\n\nIt was told.\n\n<!-- prose: on -->\n\nA plan.\n",
        "::: fxremat.told\n",
    ],
)
def test_code_addresses_and_comments_are_ignored(page: str) -> None:
    assert not flagged(page)


def test_what_follows_an_exempt_part_is_read() -> None:
    assert flagged("<!-- prose: off -->\n\nTold.\n\n<!-- prose: on -->\n\nIt was told.\n")


def test_checks_of_proselint_run() -> None:
    assert flagged("The step the step is measured.")
    assert not flagged("It has 0 0 bits; `a` `a`.")


def test_sentences_are_counted_in_words() -> None:
    page = "It has six words, `or so`. " + "One is long and " * 8 + "ends.\n\nTen GiB.\n"
    (block, _) = blocks_of_page(page)
    assert [words(text) for _, text in sentences(block)] == [5, 33]
    count, long = long_sentences("page.md", blocks_of_page(page))
    assert count == 2 and [found.words for found in long] == [33]
    assert not list(too_long(long))


def test_a_sentence_ends_at_its_full_stop() -> None:
    text = "It takes 0.5 GiB, e.g. for torch. It is\ncounted (once.) Then `step` runs."
    assert [(line, len(text.split())) for line, text in sentences(Block(7, text))] == [
        (7, 7),
        (7, 4),
    ]
    assert [
        line for line, _ in sentences(Block(7, "One two three four.\nFive is on line eight."))
    ] == [7, 8]


def test_no_sentence_may_have_over_45_words() -> None:
    _, long = long_sentences("page.md", [Block(1, "a word " * 23 + "ends.")])
    assert ["47 words" in str(found) for found in too_long(long)] == [True]


def test_three_percent_may_be_long() -> None:
    assert not too_many(3, 100) and too_many(4, 100)
    assert not too_many(1, 5)  # a short page may have one


def test_docstrings_are_read_entry_by_entry() -> None:
    text = """Plan a step.

    It is one.

    Args:
        model: the model, which
            is told.
        **options: as for ``compile``.

    Raises:
        BudgetError: nothing fits.
    """
    blocks = blocks_of_docstring(text, 10)
    assert [(block.line, block.text.split("\n")[0]) for block in blocks] == [
        (10, "Plan a step."),
        (12, "It is one."),
        (15, "the model, which"),
        (17, "as for Xx."),
        (20, "nothing fits."),
    ]
    assert [found.line for found in wording("x.py", blocks)] == [16]


def test_of_code_comments_docstrings_and_messages_are_read() -> None:
    source = '''told = "told"  # a name and a key are no prose


def told_of(x: int) -> str:
    """Return what was told."""
    # A comment that is
    # written anew.
    return f"{x} told " "twice"
'''
    found = wording("x.py", blocks_of_code(source), only_vocabulary=True)
    assert [f.line for f in found] == [5, 7, 8]


def test_a_file_can_be_checked_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = tmp_path / "page.md"
    page.write_text("The plan is measured anew.\n")
    assert main([str(page)]) == 1
    assert "page.md:1: 'anew'" in capsys.readouterr().out
    page.write_text("The plan is measured again.\n")
    assert main([str(page)]) == 0


def test_contributors_read_the_same_words(capsys: pytest.CaptureFixture) -> None:
    assert main(["--words"]) == 0
    assert capsys.readouterr().out in (ROOT / "CONTRIBUTING.md").read_text()


def test_everything_that_is_published_passes(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0, capsys.readouterr().out
