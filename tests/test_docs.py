"""What the pages tell is true: links lead somewhere, code is code, nothing public is left out."""

from __future__ import annotations

import ast
import inspect
import operator
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import fxremat
from docs.generated import generated_files, generated_pages
from fxremat.costs.measured import cache
from fxremat.options.table import OPTIONS, fields_of
from fxremat.planner.search.search import GENERATORS_BY_NAME

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PUBLIC = set(fxremat.__all__) - {"__version__"}


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_in(text: str) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)^ *```", text, flags=re.M | re.S)
    return list(map(textwrap.dedent, found))


def python_of(page: Path) -> list[str]:
    return python_in(page.read_text())


def test_each_test_that_works_with_names_exists() -> None:
    page = (ROOT / "docs/works-with.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page))
    assert len(named) > 20
    for path, function in named:
        tree = ast.parse((ROOT / path).read_text())
        defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert function in defined, (path, function)


def test_each_row_of_works_with_has_its_test() -> None:
    rows, tests = (ROOT / "docs/works-with.md").read_text().split("## Tests of the rows")
    tables = rows.split("\n## ", 1)[1]
    named = [line.split(" | ")[0] for line in tests.splitlines() if line.startswith("| ")]
    for line in tables.splitlines():
        if line.startswith("| ") and not line.endswith("the step is |"):
            row = line.split(" | ")[0]
            assert row in named or "while_loop` with a gradient" in row, row


@pytest.mark.skipif(
    not (ROOT / "benchmarks/results").exists(), reason="an sdist lacks results and pictures"
)
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
            given = isinstance(node, ast.Call) and node.keywords
            if given and re.fullmatch(r"fxremat[.\w]+", name_of(node)):
                check_keywords(node)


def name_of(call: ast.Call) -> str:
    return ast.unparse(call.func)


def check_keywords(call: ast.Call) -> None:
    called = operator.attrgetter(name_of(call).removeprefix("fxremat."))(fxremat)
    names = set(inspect.signature(called).parameters)
    if "options" in names:
        names |= set(inspect.signature(fxremat.compile).parameters)
    assert {keyword.arg for keyword in call.keywords if keyword.arg} <= names, name_of(call)


def test_the_reference_has_every_public_name() -> None:
    pages = (page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    text = "\n".join(pages)
    assert set(re.findall(r"^::: fxremat\.(\w+)$", text, flags=re.M)) == PUBLIC


def described(name: str) -> list[tuple[str, str]]:
    """A public name and what is public of it, each with its docstring."""
    own = getattr(fxremat, name)
    found = {name: own}
    for base in own.__mro__ if isinstance(own, type) else ():
        if base.__module__.startswith("fxremat"):
            for attribute, value in vars(base).items():
                value = value.fget if isinstance(value, property) else value
                value = getattr(value, "__func__", value)
                if not attribute.startswith("_") and inspect.isfunction(value):
                    found[f"{name}.{attribute}"] = value
    return [(place, inspect.getdoc(value) or "") for place, value in found.items()]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_docstrings_can_be_read_alone(name: str) -> None:
    """None begins with what another would have to have said, nor has an attribute that does."""
    leans = r"(of|that of|those of|the same|the one|it|both|back|likewise|all such|such)\b"
    for place, text in described(name):
        assert text, place
        first, *_ = text.splitlines()
        assert not re.match(leans, first, flags=re.I), (place, first)
        assert len(first.split()) > 3, (place, first)


def test_pages_that_are_made_from_the_code_are_current() -> None:
    for name, content in generated_files(ROOT).items():
        assert (ROOT / name).read_text() == content, "run: python -m docs.generated"


def test_every_option_has_its_row_and_its_section() -> None:
    page = (ROOT / "docs/reference/options.md").read_text()
    names = [option.name for option in OPTIONS]
    assert re.findall(r"^\| \[`(\w+)=`\]\(#\1\)", page, flags=re.M) == names
    assert re.findall(r"^## `(\w+)`$", page, flags=re.M) == names
    for option in OPTIONS:
        assert all(f"| `{field.name}` |" in page for field in option.fields)


def test_every_command_and_flag_is_described() -> None:
    page = (ROOT / "docs/reference/command.md").read_text()
    flags = {f"--{field.name.replace('_', '-')}" for field in fields_of("plan") if field.flag}
    assert flags <= set(re.findall(r"`(--[\w-]+)`", page))


def test_every_environment_variable_is_described() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    code = (path.read_text() for path in (ROOT / "fxremat").rglob("*.py"))
    used = {name for text in code for name in re.findall(r"\bFXREMAT_[A-Z]+\b", text)}
    assert used and used <= set(re.findall(r"^\| `(\w+)`", page, flags=re.M))


def test_every_constant_says_what_it_is_for() -> None:
    """Its page is made of these words."""
    page = generated_pages(ROOT)["docs/reference/constants.md"]
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 100
    assert not [row for row in rows if row.endswith("|  |")]
    assert all(f"| `{field.name}` |" in page for field in fields(fxremat.Effort))
