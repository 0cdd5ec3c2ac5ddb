"""The command ``env``: what it lists, what it leaves out, and its exit codes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fxremat
from fxremat.command import main
from fxremat.command.probes import REQUIRED
from fxremat.torch_versions import supported


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON that the command has printed."""
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_what_an_issue_needs_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = listed(capsys)
    assert facts["fxremat"]["version"] == fxremat.__version__
    assert facts["torch"]["version"] == torch.__version__
    assert facts["torch threads"] == torch.get_num_threads()
    assert facts["cpu"]["cores"] > 0 and facts["ram"] > 0
    assert facts["c++ compiler"].keys() >= {"works"}
    assert {"python", "os", "triton", "ortools", "rich", *REQUIRED} <= facts.keys()
    assert facts["problems"] == []


def test_text_has_a_line_for_each_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    names = [name for name in listed(capsys) if name != "problems"]
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].rstrip() for line in lines] == names
    columns = {
        len(line) - len(line[len(name) :].lstrip()) for line, name in zip(lines, names, strict=True)
    }
    assert len(columns) == 1  # aligned


def test_the_cache_folder_is_the_one_that_is_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    (tmp_path / "fxremat-costs-0.json.gz").write_bytes(b"12345")
    assert main(["env", "--json"]) == 0
    expected = {"path": str(tmp_path), "writable": True, "entries": 1, "bytes": 5}
    assert listed(capsys)["cache"] == expected
    monkeypatch.setenv("FXREMAT_CACHE", "0")
    assert main(["env", "--json"]) == 0
    assert listed(capsys)["cache"]["path"] is None


def test_other_variables_secrets_and_the_home_folder_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "jane"))
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path / "jane" / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    monkeypatch.setenv("TORCHINDUCTOR_REDIS_URL", "redis://jane:pass@host")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    for arguments in (["env"], ["env", "--json"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "expandable_segments:True" in out and "TORCHINDUCTOR_REDIS_URL" in out
        assert not any(word in out for word in ("hf_other", "HF_TOKEN", "pass@", "jane"))
        assert "~/cache" in out


def test_a_missing_package_is_a_line_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = importlib.import_module

    def without(name: str, package: str | None = None) -> ModuleType:
        if name == "networkx":
            raise ImportError("it is\nbroken")
        return loaded(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    assert main(["env"]) == 1
    said = capsys.readouterr()
    assert "problem" in said.out and "pip install networkx" in said.out
    assert "Traceback" not in said.out + said.err


def test_a_probe_that_fails_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:
        raise RuntimeError("no driver\nof this kind")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert main(["env", "--json"]) == 0
    facts = listed(capsys)
    assert facts["devices"] == {"error": "RuntimeError: no driver"}
    assert facts["ram"] > 0


def test_a_compiler_that_does_not_work_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(
        "#!/bin/sh\nif [ $# -gt 1 ]; then echo no header >&2; exit 1; fi\necho 13\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(compiler))}):
        assert main(["env", "--json"]) == 0
    found = listed(capsys)["c++ compiler"]
    assert found == {"path": str(compiler), "works": False}


def test_the_report_is_made_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from fxremat.command import main; sys.exit(main(['env']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "pip install torch" in ran.stdout
    assert "numba" in ran.stdout and "cpu" in ran.stdout
    assert not ran.stderr


def test_the_supported_range_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    assert listed(capsys)["torch supported"] == {"supported": True, "range": supported()}
