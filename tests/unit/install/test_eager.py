"""Messages that Open MPI sends without a handshake, and its send buffers (psdist.install.eager)."""

from pathlib import Path

import pytest

from psdist.install.eager import MOST_HELD_BYTES, held_bytes, limits, own_values

MIB = 1 << 20
EAGER = "OMPI_MCA_btl_tcp_eager_limit"


def own(job: dict[str, str], *, link: float = 0.0, file: str | None = None) -> dict[str, str]:
    return own_values(job, link_bytes_per_s=link, library_file=file)


def slurm(ranks: int, nodes: int = 4) -> dict[str, str]:
    return {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "HOME": "/nonexistent",
    }


@pytest.mark.parametrize(("ranks", "mib"), [(2, 4), (8, 4), (16, 2), (64, 0.5)])
def test_chunks_of_a_job_of_several_hosts_leave_at_once(ranks: int, mib: float) -> None:
    set_here = own(slurm(ranks))
    assert set(set_here) == {"OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_max_send_size"}
    job = slurm(ranks) | set_here
    assert held_bytes(job, int(mib * MIB)) == mib * MIB
    assert held_bytes(job, int(mib * MIB) + 8192) == 64 << 10  # with a handshake
    assert 2 * ranks * held_bytes(job, int(mib * MIB)) <= MOST_HELD_BYTES


def test_one_host_or_very_many_ranks_keep_the_limits_of_mpi() -> None:
    assert own(slurm(8, nodes=1)) == {}
    assert own(slurm(1024)) == {}
    assert own({}) == {}
    mpirun = {f"OMPI_COMM_WORLD_{name}": "4" for name in ("SIZE", "LOCAL_SIZE")}
    assert own(mpirun) == {}
    on_two_hosts = mpirun | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert own(on_two_hosts)
    # In an allocation, mpirun's daemon on the second host is a step of one node.
    assert own(on_two_hosts | {"SLURM_STEP_NUM_NODES": "1"}) == own(on_two_hosts)


def test_a_limit_that_the_user_has_chosen_stays(tmp_path: Path) -> None:
    job = slurm(8)
    for chosen in ({EAGER: "1024"}, {"OMPI_MCA_btl_tcp_max_send_size": "131072"}):
        assert own(job | chosen) == chosen
    home = tmp_path / ".openmpi"
    home.mkdir()
    (home / "mca-params.conf").write_text("btl = self,tcp\n  btl_tcp_eager_limit = 32768\n")
    # As a variable: the ranks compare those, and credits depend on them.
    assert own(job | {"HOME": str(tmp_path)}) == {EAGER: "32768"}
    assert own(job | {"HOME": str(tmp_path), EAGER: "1"}) == {EAGER: "1"}
    (home / "mca-params.conf").write_text("# btl_tcp_eager_limit = 32768\n")
    assert own(job | {"HOME": str(tmp_path)})
    other = tmp_path / "params"
    other.write_text("btl_tcp_rndv_eager_limit=1\n")
    assert own(job | {"OMPI_MCA_mca_base_param_files": f"/none:{other}"}) == {
        "OMPI_MCA_btl_tcp_rndv_eager_limit": "1"
    }


def test_the_file_of_the_installation_is_the_users_too(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    library = str(tmp_path / "lib" / "libmpi.so.40")
    assert own(slurm(8), file=library)
    (tmp_path / "etc" / "openmpi-mca-params.conf").write_text("btl_tcp_max_send_size = 65536\n")
    theirs = {"OMPI_MCA_btl_tcp_max_send_size": "65536"}
    assert own(slurm(8), file=library) == theirs
    assert own(slurm(8) | {"OPAL_PREFIX": str(tmp_path)}) == theirs


def test_limits_are_compared_as_texts_and_strange_ones_count_as_mpis_own() -> None:
    assert limits({}) == ["", "", ""]
    job = slurm(8) | own(slurm(8))
    assert limits(job) == [str(4 * MIB + 4096), "", str(4 * MIB + 4096)]
    assert held_bytes({"OMPI_MCA_btl_tcp_eager_limit": "4m"}, 1 * MIB) == 64 << 10


def test_a_slow_link_gets_small_send_buffers_and_one_that_is_fast_or_unknown_none() -> None:
    name = "OMPI_MCA_btl_tcp_sndbuf"
    job = slurm(8)
    assert own(job, link=32e6)[name] == own(job, link=125e6)[name] == "65536"
    assert name not in own(job, link=1.25e9)
    assert name not in own(job, link=0.0)
    assert name not in own(slurm(8, nodes=1), link=32e6)
    assert name not in own(job | {name: "0"}, link=32e6)
