"""The memory that is left, read from a machine's and a container's files."""

from pathlib import Path

import pytest

from titan_grpo.errors import ConfigError
from titan_grpo.layout.memory import available_memory, require_memory

GIB = 1 << 30


def machine(root: Path, cgroups: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc with 8 GiB available and a /sys/fs/cgroup with ``files``."""
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"
    )
    (proc / "self" / "cgroup").write_text(cgroups)
    for name, text in files.items():
        path = cgroup / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroup


def test_without_a_limit_the_machine_decides(tmp_path: Path) -> None:
    assert (
        available_memory(
            *machine(tmp_path, "0::/\n", {"memory.max": "max\n", "memory.current": "5\n"})
        )
        == 8 * GIB
    )


def test_a_container_of_the_second_kind_counts_its_reclaimable_cache(tmp_path: Path) -> None:
    files = {
        "memory.max": str(4 * GIB),
        "memory.current": str(3 * GIB),
        "memory.stat": f"anon 7\ninactive_file {GIB}\n",
    }
    assert available_memory(*machine(tmp_path, "0::/\n", files)) == 2 * GIB


def test_a_limit_on_a_parent_group_binds(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": str(GIB),
        "pod/memory.current": "0",
        "pod/run/memory.max": "max",
        "pod/run/memory.current": "0",
    }
    assert available_memory(*machine(tmp_path, "0::/pod/run\n", files)) == GIB


def test_a_container_of_the_first_kind_has_its_own_files(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": str(2 * GIB),
        "memory/job/memory.usage_in_bytes": str(GIB),
    }
    assert available_memory(*machine(tmp_path, "9:name=systemd:/\n4:memory:/job\n", files)) == GIB


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    assert (
        available_memory(
            *machine(tmp_path, "0::/\n", {"memory.max": "100", "memory.current": "200"})
        )
        == 0
    )


def test_a_machine_without_these_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs Linux"):
        available_memory(tmp_path, tmp_path)


def test_this_machine_can_be_read() -> None:
    assert available_memory() > 0
    require_memory(1, "one byte")


def test_too_little_memory_names_bytes_and_remedy() -> None:
    with pytest.raises(
        ConfigError,
        match=rf"2 images needs {1 << 60} bytes.*available are \d+ .*; use a machine or container",
    ):
        require_memory(1 << 60, "2 images")
