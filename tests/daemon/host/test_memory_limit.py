"""The memory limit of a process: files as the kernel writes them, read from real folders."""

from pathlib import Path

import pytest

from gpulease.daemon.host.memory_limit import MemoryLimit, group_memory_limit, host_memory

MIB = 1 << 20


def a_process(folder: Path, mounts: str, groups: str, **limits: str) -> Path:
    """Return a folder as /proc/self, after writing each limit into its file below the folder."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text(f"22 27 0:21 / /proc rw shared:5 - proc proc rw\n{mounts}")
    (proc / "cgroup").write_text(groups)
    for place, text in limits.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return proc


@pytest.mark.parametrize(
    ("outer", "inner", "least"),
    [("max", "max", None), ("max", str(3 * MIB), ("a/b", 3)), (str(2 * MIB), str(3 * MIB), ("a", 2))],
)
def test_version_2_counts_every_group_up_to_the_root(
    tmp_path: Path, outer: str, inner: str, least: tuple[str, int] | None
) -> None:
    mount = f"{tmp_path}/cg"
    files = {"cg/a/memory.max": outer, "cg/a/b/memory.max": inner, "cg/other/memory.max": str(MIB)}
    proc = a_process(tmp_path, f"31 23 0:30 / {mount} rw - cgroup2 cgroup2 rw\n", "0::/a/b\n", **files)
    expected = None if least is None else MemoryLimit(least[1] * MIB, f"the limit in {mount}/{least[0]}/memory.max")
    assert group_memory_limit(proc) == expected


def test_version_1_counts_the_hierarchy_of_memory_only(tmp_path: Path) -> None:
    mounts = (
        f"32 31 0:29 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu\n"
        f"33 31 0:32 / {tmp_path}/my\\040memory rw - cgroup cgroup rw,memory\n"
        f"34 31 0:38 / {tmp_path}/unified rw - cgroup2 cgroup2 rw\n"
    )
    files = {
        "cpu/a/memory.limit_in_bytes": str(MIB),
        "my memory/memory.limit_in_bytes": "9223372036854771712",
        "my memory/a/memory.limit_in_bytes": str(5 * MIB),
    }
    proc = a_process(tmp_path, mounts, "4:cpu:/a\n3:memory:/a\n0::/\n", **files)
    assert group_memory_limit(proc) == MemoryLimit(
        5 * MIB, f"the limit in {tmp_path}/my memory/a/memory.limit_in_bytes"
    )


@pytest.mark.parametrize("path", ["/docker/x", "/docker/x/inner", "/"])
def test_a_container_whose_mount_begins_at_its_own_group(tmp_path: Path, path: str) -> None:
    mounts = f"31 23 0:30 /docker/x {tmp_path}/cg rw - cgroup cgroup rw,memory\n"
    proc = a_process(tmp_path, mounts, f"3:memory:{path}\n", **{"cg/memory.limit_in_bytes": str(7 * MIB)})
    assert group_memory_limit(proc) == MemoryLimit(7 * MIB, f"the limit in {tmp_path}/cg/memory.limit_in_bytes")


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert group_memory_limit(tmp_path / "none") is None


def test_the_hosts_memory_is_that_of_meminfo() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert host_memory() == MemoryLimit(int(fields["MemTotal"].split()[0]) * 1024, "this host's memory")
