"""The project's metadata, its workflows and what they call agree with each other."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fxremat.torch_versions import NEWEST, OLDEST, supported

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GITHUB = ROOT / ".github"  # not in an sdist
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))

EXTRAS = ("accelerate", "lightning", "plot", "transformers")
"""The extras for users."""


def text_of(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"


def jobs_of(workflow: Path) -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return jobs


def commands_of(workflow: Path) -> list[str]:
    steps = [step for job in jobs_of(workflow).values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def test_the_range_of_torch_has_one_owner() -> None:
    """An upper bound would have pip replace a newer torch."""
    assert [name for name in PROJECT["dependencies"] if name.startswith("torch")] == [
        f"torch>={text_of(OLDEST)}"
    ]
    assert f"| torch | {supported()} |" in (ROOT / "SUPPORT.md").read_text()
    (pinned,) = re.findall(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert OLDEST <= tuple(map(int, pinned)) <= NEWEST


def test_the_version_comes_from_the_tag() -> None:
    assert PROJECT["dynamic"] == ["version"]
    version = importlib.metadata.version("fxremat")
    assert re.match(r"\d+\.\d+\.\d+|0\+unknown", version)


def test_extras_need_what_their_integration_imports() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRAS) <= set(extras)
    modules = {file.stem for file in (ROOT / "fxremat/integrations").glob("*.py")}
    for extra in set(EXTRAS) & modules:
        assert any(re.match(rf"{extra}\b", needed) for needed in extras[extra]), extra


def test_classifiers_are_the_versions_that_are_tested() -> None:
    stated = [
        line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line
    ]
    assert stated[0] == PROJECT["requires-python"].removeprefix(">=")
    assert f"| Python | {stated[0]} to {stated[-1]} |" in (ROOT / "SUPPORT.md").read_text()
    if WORKFLOWS:
        matrix = jobs_of(GITHUB / "workflows/tests.yml")["test"]["strategy"]["matrix"]
        assert matrix["python"] == stated
        releases = [tuple(map(int, each.split(".")[:2])) for each in matrix["torch"]]
        assert releases[0] == OLDEST
        assert releases[-1] == NEWEST


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_that_exist(workflow: Path) -> None:
    """There is no second list of commands: what is checked is in the Makefile."""
    made = [line.split()[1] for line in commands_of(workflow) if line.startswith("make ")]
    assert made
    assert set(made) <= TARGETS
    own = re.compile(r"\b(pytest|ruff|mypy|mkdocs|pip|twine|python)\b")
    assert not [line for line in commands_of(workflow) if own.search(line)]


@pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no workflows")
def test_the_workflows_check_what_ci_checks() -> None:
    ours = set(
        re.findall(
            r"^make --no-print-directory ([a-z][\w-]*)", (ROOT / ".ci/run").read_text(), re.M
        )
    )
    called = {
        line.split()[1] for path in WORKFLOWS for line in commands_of(path) if line[:5] == "make "
    }
    assert ours
    assert ours <= called


@pytest.mark.parametrize(
    ("torch", "environment"),
    [("", ".venv"), ("2.15.0", ".venv-torch-2.15.0"), ("nightly", ".venv-torch-nightly")],
)
def test_each_torch_is_tested_in_its_own_environment(torch: str, environment: str) -> None:
    """``make`` prints what it would run."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CONSTRAINTS")  # of a make that runs this test
    variables = {name: value for name, value in os.environ.items() if name not in outer}
    commands = subprocess.run(
        ["make", "-n", "test"],
        cwd=ROOT,
        env={**variables, "TORCH": torch},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f" {environment}/bin/python -m pytest" in commands


@pytest.mark.skipif(not WORKFLOWS, reason="an sdist has no forms")
def test_forms_ask_for_the_environment() -> None:
    for name in ("bug", "promise"):
        form = yaml.safe_load((GITHUB / f"ISSUE_TEMPLATE/{name}.yml").read_text())
        labels = [
            part["attributes"]["label"] for part in form["body"] if part["type"] == "textarea"
        ]
        assert any("fxremat env" in label for label in labels)
        assert any("fxremat doctor" in label for label in labels)


def test_hooks_call_targets_that_exist() -> None:
    file = ROOT / ".pre-commit-config.yaml"
    if not file.exists():
        pytest.skip("an sdist has no hooks")
    repos = yaml.safe_load(file.read_text())["repos"]
    entries = [hook["entry"] for repo in repos if repo["repo"] == "local" for hook in repo["hooks"]]
    assert {entry.removeprefix("make ") for entry in entries} <= TARGETS


def test_the_citation_has_every_author_that_a_solver_names() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["license"]
    cited = {a["family-names"] for paper in citation["references"] for a in paper["authors"]}
    named = re.compile(r"\b([A-Z][\w-]+(?:, [A-Z][\w-]+)+), \"|\b([A-Z]\w+) et al\.")
    authors = set()
    for file in (ROOT / "fxremat/solvers").rglob("*.py"):
        text = " ".join(file.read_text().split())
        for several, one in named.findall(text):
            authors |= set(several.split(", ")) if several else {one}
    assert len(authors) > 8
    assert authors <= cited
