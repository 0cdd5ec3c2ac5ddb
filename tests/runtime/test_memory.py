"""Host memory itself: its pages, and how much there may be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fxremat.runtime.memory import memory_limits, page_memory

MIB = 1 << 20
LINUX = sys.platform == "linux"


def flags_of(nbytes: int) -> set[str]:
    """What the system says of the mapping of that size."""
    found: set[str] = set()
    size = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = line.split()[1]
        elif line.startswith("VmFlags:") and size == str(nbytes // 1024):
            found |= set(line.split()[1:])
    return found


@pytest.mark.skipif(not LINUX, reason="advises Linux")
def test_pages_are_huge_and_no_childs():
    nbytes = 37 * MIB
    memory = page_memory(nbytes)
    memory[0] = memory[nbytes - 1] = 7
    assert {"wf", "hg"} <= flags_of(nbytes)
    assert "sh" not in flags_of(nbytes)
    child = os.fork()
    if not child:
        os._exit(memory[0] + memory[nbytes - 1])
    assert os.waitpid(child, 0)[1] == 0
    assert (memory[0], memory[nbytes - 1]) == (7, 7)


def test_where_it_cannot_be_wiped_it_is_shared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fxremat.runtime.memory._MADV_WIPEONFORK", 1 << 20)
    memory = page_memory(MIB)
    child = os.fork()
    if not child:
        memory[0] = 5
        os._exit(0)
    os.waitpid(child, 0)
    assert memory[0] == 5


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limits(root: Path) -> list[int]:
    return [nbytes for nbytes, whose in memory_limits(root) if whose == "the control group"]


def test_limits_of_control_groups_count_up_to_the_top(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "0::/jobs/one\n")
    write(tmp_path / "sys/fs/cgroup/jobs/one/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/jobs/memory.max", f"{5 * MIB}\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", f"{9 * MIB}\n")
    write(tmp_path / "memory.max", "1\n")
    assert limits(tmp_path) == [5 * MIB, 9 * MIB]


def test_limits_of_a_container_that_sees_its_group_as_the_top(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "0::/docker/0123\n")
    write(tmp_path / "sys/fs/cgroup/memory.max", f"{3 * MIB}\n")
    assert limits(tmp_path) == [3 * MIB]


def test_limits_of_the_first_kind_of_control_groups(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "7:cpu,cpuacct:/other\n4:memory:/jobs\n")
    write(tmp_path / "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", f"{2 * MIB}\n")
    write(tmp_path / "sys/fs/cgroup/cpu,cpuacct/other/memory.limit_in_bytes", "1\n")
    assert limits(tmp_path) == [2 * MIB]


def test_without_any(tmp_path: Path):
    assert limits(tmp_path) == []
    ((nbytes, whose),) = memory_limits(tmp_path)
    assert whose == "the machine"
    assert nbytes > 100 * MIB
