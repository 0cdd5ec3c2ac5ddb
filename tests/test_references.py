"""The solvers' exhaustive tests run for a while after anything that they read has changed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.references import COMMITS, DAYS, FOLDERS, READ, ROOT, have_changed

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")

DAY_S = 24 * 3600
BEGIN_S = 1_700_000_000


class Repository:
    """A repository whose commits are as many seconds after ``BEGIN_S`` as is said."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q", "-b", "main")
        self.change("fxremat/solvers/rotor.py", after_s=0)

    def git(self, *arguments: str, after_s: int = 0) -> None:
        date = f"{BEGIN_S + after_s} +0000"
        who = {f"GIT_{one}_{what}": "a@b" for one in ("AUTHOR", "COMMITTER") for what in WHO}
        dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
        subprocess.run(["git", *arguments], cwd=self.root, env=os.environ | who | dates, check=True)

    def change(self, name: str, *, after_s: int) -> None:
        """Commit another line of a file."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write("# another line\n")
        self.git("add", name)
        self.git("commit", "-q", "-m", name, after_s=after_s)

    def pass_by(self, *, commits: int, days: float) -> None:
        """Commit other files, the last one that many days after the beginning."""
        for count in range(commits):
            self.change("README.md", after_s=int(days * DAY_S) - commits + count + 1)


WHO = ("NAME", "EMAIL")


def test_a_change_counts_for_some_days_and_commits(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    assert have_changed(tmp_path)
    repository.pass_by(commits=COMMITS, days=DAYS - 1)
    assert have_changed(tmp_path), "there were many commits, but few days"
    repository.pass_by(commits=1, days=DAYS)
    assert not have_changed(tmp_path)
    repository.change("tests/reference/brute/chain.py", after_s=9 * DAY_S)
    assert have_changed(tmp_path)
    repository.pass_by(commits=1, days=9 + 2 * DAYS)
    assert have_changed(tmp_path), "there were many days, but one commit"
    repository.pass_by(commits=COMMITS, days=9 + 3 * DAYS)
    assert not have_changed(tmp_path)


@pytest.fixture
def quiet(tmp_path: Path) -> Repository:
    """Where nothing has changed for long."""
    repository = Repository(tmp_path)
    repository.pass_by(commits=COMMITS, days=2 * DAYS)
    assert not have_changed(tmp_path)
    return repository


def test_a_merge_counts_as_made_when_it_was_merged(quiet: Repository) -> None:
    quiet.git("checkout", "-q", "-b", "old", "HEAD~30")
    quiet.change("fxremat/ir/chain.py", after_s=DAY_S)
    quiet.git("checkout", "-q", "main")
    assert not have_changed(quiet.root)
    quiet.git("merge", "-q", "--no-edit", "old", after_s=3 * DAYS * DAY_S)
    assert have_changed(quiet.root)


@pytest.mark.parametrize("name", ["fxremat/solvers/rotor.py", "tests/problems.py"])
def test_what_is_not_committed_counts(name: str, quiet: Repository) -> None:
    (quiet.root / name).parent.mkdir(parents=True, exist_ok=True)
    (quiet.root / name).write_text("# of the work tree\n")
    assert have_changed(quiet.root)


def test_other_files_do_not_count(quiet: Repository) -> None:
    quiet.change("fxremat/planner/search/search.py", after_s=3 * DAYS * DAY_S)
    (quiet.root / "README.md").write_text("of the work tree\n")
    assert not have_changed(quiet.root)


@pytest.mark.parametrize(("depth", "expected"), [(1, True), (COMMITS + 1, False)])
def test_a_shallow_clone_says_so_only_of_what_it_has(
    depth: int, expected: bool, quiet: Repository, tmp_path_factory: pytest.TempPathFactory
) -> None:
    quiet.pass_by(commits=10, days=3 * DAYS)
    clone = tmp_path_factory.mktemp("clone")
    source = quiet.root.as_uri()
    quiet.git("clone", "-q", "--depth", str(depth), source, str(clone))
    assert have_changed(clone) == expected


def test_without_a_history_they_count_as_changed(
    quiet: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        assert have_changed(quiet.root), "there is no git"
    shutil.rmtree(quiet.root / ".git")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(quiet.root.parent))
    assert have_changed(quiet.root)


def test_all_that_property_tests_import_is_read() -> None:
    """Left out are errors, and the schedule that keeps all, which computes nothing."""
    left_out = ("fxremat", "fxremat.errors", "fxremat.passes.emit.program", "tests")
    assert all((ROOT / name).exists() for name in READ), "name what replaced it"
    for file in _with_properties():
        for name in _imported(file):
            path = name.replace(".", "/")
            read = any(path == r.removesuffix(".py") or path.startswith(f"{r}/") for r in READ)
            assert read or name in left_out, f"{file} imports {name}"


def _with_properties() -> list[Path]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in files if "@given" in file.read_text() or "brute" in file.parts]


def _imported(file: Path) -> set[str]:
    """Return the modules of the package and of the tests that ``file`` imports as it is loaded."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {n for n in names if n and n.split(".")[0] in ("fxremat", "tests")}
    return found
