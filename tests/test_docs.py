"""What the pages tell is true: links lead somewhere, code is code, nothing public is left out."""

from __future__ import annotations

import ast
import inspect
import operator
import re
import textwrap
from pathlib import Path

import pytest

import fxremat

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PUBLIC = set(fxremat.__all__) - {"__version__"}


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_of(page: Path) -> list[str]:
    blocks = re.findall(r"^( *)```python\n(.*?)^ *```", page.read_text(), flags=re.M | re.S)
    return [textwrap.dedent(text) for _, text in blocks]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


WITH_CODE = [page for page in PAGES if python_of(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=page_id)
def test_code_is_of_what_there_is(page: Path) -> None:
    """Blocks compile, and use no name or argument that fxremat lacks."""
    for text in python_of(page):
        for node in ast.walk(ast.parse(text, page.name)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "fxremat":
                assert node.attr in PUBLIC
            if isinstance(node, ast.Call) and re.fullmatch(r"fxremat[.\w]+", name_of(node)):
                check_keywords(node)


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def check_keywords(call: ast.Call) -> None:
    called = operator.attrgetter(name_of(call).removeprefix("fxremat."))(fxremat)
    names = set(inspect.signature(called).parameters)
    if "options" in names:
        names |= set(inspect.signature(fxremat.compile).parameters)
    assert {keyword.arg for keyword in call.keywords} <= names, name_of(call)


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    assert set(re.findall(r"^::: fxremat\.(\w+)$", text, flags=re.M)) == PUBLIC
