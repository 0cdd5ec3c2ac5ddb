"""Errors and warnings: each code comes as the table says, and its advice helps."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import fxremat
from docs import troubleshooting
from fxremat.command import main
from fxremat.costs.measured import cache
from fxremat.diagnostics.entry import Diagnostic
from fxremat.diagnostics.table import BY_CODE, DIAGNOSTICS
from fxremat.errors import FAULT, FxrematError, FxrematWarning, refuse
from fxremat.planner.search.search import GENERATORS_BY_NAME

ROOT = Path(__file__).parent.parent
PAGE = troubleshooting.FILE.read_text()
KINDS: dict[str, Any] = {
    name: getattr(fxremat, name) for name in fxremat.__all__ if re.search("Error$|Warning$", name)
}


def code_of(entry: Diagnostic) -> str:
    return entry.code


def masked(text: str) -> str:
    """A text without numbers, units, names of kernels and line breaks, which differ by run."""
    text = re.sub(r"\b\w+_[0-9a-f]{8}\b", "NAME", " ".join(text.split()))
    return re.sub(r"\d[\d.]*( (bytes|[KMG]iB|B|ns|µs|ms|s)\b)?", "N", text)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")
@patch.dict(GENERATORS_BY_NAME)  # a program adds one
@pytest.mark.parametrize("entry", [e for e in DIAGNOSTICS if e.trouble], ids=code_of)
def test_each_code_comes_as_the_page_says_and_its_advice_helps(
    entry: Diagnostic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache, "COSTS", defaultdict(cache.CostCache))  # a program measures
    names: dict[str, Any] = {}
    error = troubleshooting.raised_by(entry, tmp_path, names)
    assert isinstance(error, entry.kind) and type(error).__name__ == entry.kind.__name__
    if torch.__version__.startswith("2.13"):  # Dynamo's part of a text is that of the version
        shown = troubleshooting.texts_of(PAGE)[entry.code]
        assert masked(troubleshooting.printed(error)) == masked(shown)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxrematWarning)
        for remedy in entry.remedies:
            troubleshooting.run(remedy, tmp_path, names)


@pytest.mark.parametrize("entry", [e for e in DIAGNOSTICS if not e.trouble], ids=code_of)
def test_what_takes_more_than_a_program_is_raised_by_another_test(entry: Diagnostic) -> None:
    assert entry.needs
    file, _, name = entry.test.partition("::")
    source = (ROOT / file).read_text()
    (test,) = (n for n in ast.parse(source).body if getattr(n, "name", "") == name)
    assert entry.code in (ast.get_source_segment(source, test) or "")


def test_the_page_is_made_of_the_table() -> None:
    """But for the printed texts, which the programs' own tests compare."""
    assert troubleshooting.page(troubleshooting.texts_of(PAGE)) == PAGE


def test_each_entry_has_an_anchor() -> None:
    for entry in DIAGNOSTICS:
        anchor = f'<a id="{entry.code.lower()}"></a>\n\n### {entry.code}: '
        assert PAGE.count(anchor) == 1 and f"(#{entry.code.lower()})" in PAGE


def test_codes_are_unique_and_of_one_form() -> None:
    assert len(BY_CODE) == len(DIAGNOSTICS)
    assert all(re.fullmatch(r"FXR\d{3}", code) for code in BY_CODE)
    assert [*BY_CODE] == sorted(BY_CODE)
    for entry in DIAGNOSTICS:
        assert entry.title and entry.why.endswith(".") and entry.remedy.endswith(".")
        assert bool(entry.trouble) == bool(entry.remedies) != bool(entry.needs)


def test_each_public_class_has_a_code() -> None:
    for name, kind in KINDS.items():
        assert any(issubclass(entry.kind, kind) for entry in DIAGNOSTICS), name
    assert {kind.default_code for kind in KINDS.values()} - {""} <= BY_CODE.keys()


def constants(node: ast.AST) -> set[str]:
    """The codes in an expression; ``FAULT`` is one."""
    found = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    found |= {FAULT for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == "FAULT"}
    return {code for code in found if isinstance(code, str) and re.fullmatch(r"FXR\d+", code)}


def kind_of(call: ast.Call, file: Path) -> type | None:
    """The class of what a call makes: its own, or that of a function that warns."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in {"_warn", "_warn_once"} and file.parts[-2:] == ("regions", "warnings.py"):
        return fxremat.GraphBreakWarning
    if name == "warn" and isinstance(call.func, ast.Name):
        return fxremat.BudgetWarning
    return KINDS.get(name) if isinstance(call.func, ast.Name) else None


def test_each_error_in_the_source_has_a_code_of_its_class() -> None:
    used = {kind.default_code for kind in KINDS.values()} - {""}
    for file in sorted((ROOT / "fxremat").rglob("*.py")):
        if file.parent.name == "diagnostics":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            kind = kind_of(node, file) if isinstance(node, ast.Call) else None
            if kind is None or not isinstance(node, ast.Call) or not node.args:
                continue
            place = f"{file}:{node.lineno}"
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            assert given or kind.default_code, f"{place} has no code"  # type: ignore[attr-defined]
            for code in set().union(*map(constants, given)):
                assert code in BY_CODE, f"{place}: {code} is not in the table"
                assert issubclass(kind, BY_CODE[code].kind), f"{place}: {code} is of another class"
                used.add(code)
    assert used == BY_CODE.keys()


def test_a_text_ends_with_its_code_and_the_error_is_plain() -> None:
    error = fxremat.BudgetError("too small", code="FXR002", least_budget_bytes=3)
    assert error.message == error.args[0] == "too small"
    assert str(error).splitlines()[1:] == [
        "[FXR002: docs/troubleshooting.md#fxr002, or run: fxremat explain FXR002]"
    ]
    assert str(fxremat.BudgetError("of a user")) == "of a user"
    assert fxremat.GraphError("of a pass").code == FAULT


def refused() -> FxrematError:
    with pytest.raises(fxremat.ArgumentError) as caught:
        refuse("share", 3, "in (0, 1]")
    if sys.version_info >= (3, 11):
        caught.value.add_note("a note")
    return caught.value


ERRORS = [
    fxremat.BudgetError("no", code="FXR002", least_budget_bytes=3, largest={"x": 1}),
    fxremat.SizesError("found"),
    fxremat.HostMemoryError("no", asked_bytes=1, code="FXR711"),
    fxremat.RankError("no", ranks=[1, 2], code="FXR731"),
    fxremat.PlanError("no", differs=("a", "b"), code="FXR602"),
    fxremat.BudgetWarning("no", code="FXR101"),
    refused(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_are_copied_and_pickled(error: Any, copied: Any) -> None:
    """As between processes: some have arguments that only a keyword passes."""
    other = copied(error)
    assert type(other) is type(error) and str(other) == str(error)
    assert other.args == error.args and vars(other) == vars(error)


def test_an_error_is_pickled_as_its_own_class_where_torch_has_derived_one() -> None:
    derived = type("SizesError", (fxremat.SizesError,), {"__module__": "fxremat.errors"})
    error = derived("found")
    error.compiler = torch._dynamo.utils.CompileId(frame_id=0, frame_compile_id=0)
    other = pickle.loads(pickle.dumps(error))
    assert not hasattr(other, "compiler")
    assert type(other) is fxremat.SizesError and other.found == "found"


def test_warnings_of_others_in_a_class_of_ours_are_printed_as_they_are() -> None:
    with pytest.warns(fxremat.BudgetWarning) as caught:
        warnings.warn("over", fxremat.BudgetWarning, stacklevel=1)
    assert str(caught[0].message) == "over"
    assert caught[0].message.code == ""  # type: ignore[union-attr]


def test_explain_prints_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    entry = BY_CODE["FXR002"]
    assert main(["explain", "fxr002"]) == 0
    text = capsys.readouterr().out
    assert entry.title in text and 'fxremat.compile(model, x, "1 MiB")' in text
    assert " ".join(entry.why.split()) in " ".join(text.split())
    assert main(["explain", "FXR002", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["code"], data["kind"], data["title"]) == ("FXR002", "BudgetError", entry.title)
    assert main(["explain", "FXR114"]) == 0
    assert BY_CODE["FXR114"].needs in " ".join(capsys.readouterr().out.split())


def test_explain_refuses_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "FXR999"]) == 2
    assert "'FXR999'" in capsys.readouterr().err


def test_explain_does_not_import_torch() -> None:
    code = "import sys; from fxremat.command import main; main(['explain', 'FXR002'])\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
