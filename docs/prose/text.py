"""What a reader reads: the prose of Markdown pages and of Python files, with its lines."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc

from markdown_it import MarkdownIt
from markdown_it.token import Token

CODE = "Xx"
"""What stands for inline code or an address: a word that no check flags."""

SENTENCE_WORDS = 4
"""The fewest words of a sentence, where sentences are counted."""

_PARSER = MarkdownIt("commonmark").enable("table")
_STRONG = "\a"
_SWITCH = re.compile(r"<!--\s*prose:\s*(on|off)\s*-->")
_SECTION = re.compile(r"(Args|Arguments|Attributes|Returns|Raises|Yields|Example|Examples|Note):")
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)(?<!cf)[.!?]['\")]*(?=\s+[^a-z\s]|\s*\Z)")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a heading, an item of a list or a cell of a table.

    Attributes:
        line: of the file, where it starts.
        text: what a reader reads, with the line breaks of the file.
    """

    line: int
    text: str


def blocks_of_page(text: str, first_line: int = 1) -> list[Block]:
    """Return the blocks of a Markdown page.

    Code, addresses and comments are left out. So is what is between ``<!-- prose: off -->`` and
    ``<!-- prose: on -->``.
    """
    blocks: list[Block] = []
    skipped, line, cells = False, first_line, False
    for token in _PARSER.parse(text):
        if token.map is not None:
            line = token.map[0] + first_line
        if token.type == "html_block":
            for switch in _SWITCH.findall(token.content):
                skipped = switch == "off"
        cells = (cells or token.type == "table_open") and token.type != "table_close"
        if token.type != "inline" or skipped or token.content.startswith(":::"):
            continue
        prose = _run_in("".join(map(_read, token.children or ())))
        prose = re.sub(r"\A!!! \w+( .*)?", "", prose)
        if re.search(r"\w", prose):
            blocks.append(Block(line, prose if not cells else prose.replace("\n", " ")))
    return blocks


def _run_in(prose: str) -> str:
    """Return prose in which a heading at the start, as ``**Costs.**``, ends as a question does.

    It then is a sentence of any length, even of one word.
    """
    prose = re.sub(rf"\A{_STRONG}([^{_STRONG}]+)\.{_STRONG}", r"\1?", prose)
    return prose.replace(_STRONG, "")


def _read(token: Token) -> str:
    match token.type:
        case "text":
            return re.sub(r"https?://\S+", CODE, token.content)
        case "softbreak" | "hardbreak":
            return "\n"
        case "code_inline":
            return CODE
        case "image":
            return token.content
        case "strong_open" | "strong_close" | "em_open" | "em_close":
            return _STRONG
        case _:
            return ""


def blocks_of_docstring(text: str, first_line: int) -> list[Block]:
    """Return the blocks of a docstring as Google writes them: each entry is one."""
    lines, inside = [], False
    for line in cleandoc(text).splitlines():
        if _SECTION.fullmatch(line):
            inside = True
            lines.append("")
        elif inside and line.startswith("    "):
            entry = re.match(r"    (\*{0,2}[\w.`, *]+(?: \([^)]*\))?): ", line)
            if entry:
                lines.append(f"- {line[entry.end() :]}")
            else:
                lines.append(re.sub(r"\A {4}( {4})?", "  " if lines[-1][:1] in "- " else "", line))
        else:
            inside = inside and not line
            lines.append(re.sub(r"\A>>> .*", "", line))
    return blocks_of_page(_roles("\n".join(lines)), first_line)


def blocks_of_code(source: str) -> list[Block]:
    """Return the comments, docstrings and messages of a Python file.

    A string without a space is no prose.
    """
    blocks = list(_comments(source))
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner |= set(node.values)
            parts = [part.value if isinstance(part, ast.Constant) else CODE for part in node.values]
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if node not in inner and " " in text.strip():
            text = re.sub(r"```.*?```", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
            text = re.sub(r"^( +)\w+(?=: )", rf"\1{CODE}", text, flags=re.M)  # entries' names
            blocks.append(Block(node.lineno, _inline(text)))
    return sorted(blocks, key=lambda block: block.line)


def _comments(source: str) -> Iterator[Block]:
    """Yield the comments: those on successive lines are one block."""
    first, last, lines = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if line != last + 1:
            if lines:
                yield Block(first, _inline("\n".join(lines)))
            first, lines = line, []
        last = line
        lines.append(token.string.lstrip("# "))
    if lines:
        yield Block(first, _inline("\n".join(lines)))


def _inline(text: str) -> str:
    """Return text in which inline code is one word."""
    return re.sub(r"``?[^`]+``?", _blank, _roles(text))


def _blank(found: re.Match[str]) -> str:
    return CODE + "\n" * found[0].count("\n")


def _roles(text: str) -> str:
    """Return a docstring without the names of its roles, as in ``:class:`Plan```."""
    return re.sub(r":(?:class|func|meth|mod|attr|data):(?=`)", "", text)


def sentences(block: Block) -> Iterator[tuple[int, str]]:
    """Yield the sentences of a block, each with the line on which it starts.

    What has fewer than ``SENTENCE_WORDS`` words, as a figure in a table, is no sentence.
    """
    start = 0
    for end in _SENTENCE_END.finditer(block.text):
        yield from _sentence(block, start, end.end())
        start = end.end()
    yield from _sentence(block, start, len(block.text))


def _sentence(block: Block, start: int, end: int) -> Iterator[tuple[int, str]]:
    text = block.text[start:end]
    if words(text) >= SENTENCE_WORDS:
        blank = len(text) - len(text.lstrip())
        yield block.line + block.text.count("\n", 0, start + blank), " ".join(text.split())


def words(sentence: str) -> int:
    """Return how many words a sentence has. Inline code counts as one word, a sign as none."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())
