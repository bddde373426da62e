"""The least of what the host and its cgroups have left."""

from __future__ import annotations

from pathlib import Path

from psdist.workers.group.segments import free_bytes


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\n"}


def test_the_host_says_what_is_available(tmp_path: Path) -> None:
    assert free_bytes(host(tmp_path, MEMINFO)) == 1000 * 1024


def test_nothing_is_known_where_there_is_no_proc(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None


def test_a_cgroup_above_may_have_less_left_and_its_caches_count_as_free(tmp_path: Path) -> None:
    job = "sys/fs/cgroup/slurm/job"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/slurm/job/step\n",
        f"{job}/memory.max": "5000\n",
        f"{job}/memory.current": "4500\n",
        f"{job}/memory.stat": "anon 4000\ninactive_file 300\nactive_file 50\n",
        f"{job}/step/memory.max": "max\n",
        f"{job}/step/memory.current": "4500\n",
    }
    assert free_bytes(host(tmp_path, files)) == 850


def test_a_container_may_see_its_own_limit_only(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "0::/../../docker/1234\n",
        "sys/fs/cgroup/memory.max": "5000\n",
        "sys/fs/cgroup/memory.current": "6000\n",
    }
    assert free_bytes(host(tmp_path, files)) == 0


def test_cgroups_of_the_first_version_count_as_well(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/slurm"
    files = {
        **MEMINFO,
        "proc/self/cgroup": "7:cpu,cpuacct:/x\n4:memory:/slurm\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "5000\n",
        f"{folder}/memory.usage_in_bytes": "3000\n",
        f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 20\ntotal_active_file 3\n",
    }
    assert free_bytes(host(tmp_path, files)) == 2023
