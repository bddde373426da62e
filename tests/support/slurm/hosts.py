"""A Slurm cluster of four hosts in two racks on one machine, for tests and for people.

Owns: Slurm's configuration and the daemons; the hosts themselves are
tests/support/slurm/network.py's. Ends only processes that it started or that run inside its hosts.
Needs root and Debian's slurm-wlm, munge, iproute2 and libpmix-dev; standard library only, so that
it runs without a virtual environment. Its command is tests/cluster; tests use it through
tests/support/slurm/cluster.py.

    tests/cluster up --shape 1gbit --uplink 500mbit        # --racks 3+1: uneven ones
    export SLURM_CONF=/var/tmp/psdist-cluster/slurm.conf
    srun -N 4 -n 8 hostname
    tests/cluster down

The hosts share this machine's file system except /tmp and /dev/shm, which each has for itself (the
MPI libraries would otherwise take them for one host), so nothing a job needs may lie there.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.slurm import network
from tests.support.slurm.network import BRIDGE_ADDRESS, HOSTS, RACKS, SYSTEM_PATH, ClusterError, run

EVEN = "2+2"
CORES = 4
# Pretended: any two device files, which Slurm counts and hands out by their numbers.
GPU_FILES = ("/dev/null", "/dev/zero")
# Not Slurm's own ports: the machine may be part of a real cluster.
CONTROLLER_PORT, HOST_PORT = 16817, 16818
READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}


def state_directory() -> Path:
    """Where the cluster keeps everything: PSDIST_CLUSTER_DIR, or /var/tmp/psdist-cluster."""
    return Path(os.environ.get("PSDIST_CLUSTER_DIR", "/var/tmp/psdist-cluster")).absolute()


def why_unavailable() -> str | None:
    """Why no cluster can be built on this machine, or None where one can."""
    if Path("/tmp") in state_directory().parents:
        return f"PSDIST_CLUSTER_DIR={state_directory()} is under /tmp, which each host has its own"
    missing = {p for name, p in PACKAGES.items() if not shutil.which(name, path=SYSTEM_PATH)}
    # Slurm's PMIx plugin is part of slurm-wlm, but the library it opens, under the name it opens
    # it by, is not: without it srun says "Invalid MPI type 'pmix'".
    if not any(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so")):
        missing.add("libpmix-dev")
    if missing:
        return f"the Slurm test cluster needs: apt-get install {' '.join(sorted(missing))}"
    if os.geteuid() != 0:
        return "the Slurm test cluster needs root (network namespaces and slurmd)"
    probe = run("unshare", "--net", "--uts", "--mount", "true", check=False)
    if probe.returncode != 0:
        return f"root may not make namespaces here (a container?): {probe.stderr.strip()}"
    return None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster whose state lies in `directory`, up or not."""

    directory: Path

    @property
    def slurm_conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def jobs(self) -> Path:
        """A place on the file system that all hosts see."""
        return self.directory / "jobs"

    def environment(self) -> dict[str, str]:
        """Variables that a Slurm command needs to reach this cluster."""
        return {"SLURM_CONF": str(self.slurm_conf), "PATH": SYSTEM_PATH}

    def up(
        self,
        *,
        shape: str | None,
        keep: bool,
        uplink: str | Sequence[str | None] | None = None,
        racks: str | None = None,
    ) -> None:
        """Bring the cluster up, or complete one that half is, and wait until it takes jobs.

        `shape` is the rate of every host's link in both directions, such as "1gbit" (None: as fast
        as the machine copies), `uplink` that of every rack's, or one for each. `racks` are the
        numbers of hosts in them, EVEN where nobody says so; a cluster that is up with others is an
        error. With `keep` it stays up until
        `down` is called; without, a cluster that is up already stays as it is.
        """
        with self._lock():
            uplinks = network.uplinks_of(uplink)
            is_up = self.is_up()
            racks = racks or (self.racks() if is_up and keep else EVEN)
            hosts_of = network.racks_of(racks)
            if is_up and self.racks() != racks:
                raise ClusterError(
                    f"it is up with racks of {self.racks()}, not {racks}: tests/cluster down first"
                )
            if is_up and not keep:
                return
            if not is_up:
                self._down()
                try:
                    self._build(hosts_of)
                    self._start()
                    self._wait_until_ready()
                except BaseException:
                    self._down()
                    raise
            network.limit(shape, uplinks)
            state = {"keep": keep, "racks": racks}
            (self.directory / "cluster.json").write_text(json.dumps(state))

    def down(self) -> None:
        """End the daemons and all jobs; remove namespaces, bridge and names. Logs stay."""
        with self._lock():
            self._down()

    def is_up(self) -> bool:
        """Whether the network is whole, the controller answers and every host takes jobs."""
        is_built = self.slurm_conf.exists() and network.is_complete()
        return is_built and self._states().count("up") == len(HOSTS)

    def is_kept(self) -> bool:
        """True if it was started manually, so that tests leave it up."""
        return bool(self._state().get("keep"))

    def racks(self) -> str:
        """The numbers of hosts in the racks of a cluster that is up: "2+2" usually."""
        return str(self._state().get("racks", EVEN))

    def _state(self) -> dict[str, object]:
        with contextlib.suppress(FileNotFoundError):
            state: dict[str, object] = json.loads((self.directory / "cluster.json").read_text())
            return state
        return {}

    def describe(self) -> str:
        """A summary for people: partition, hosts, jobs, links, and how to use it."""
        lines = [
            self._slurm("sinfo", "--Node", "--format=%8N %10T %4c %14f %G").stdout.rstrip(),
            self._slurm("squeue", "--format=%8i %12j %8T %10M %R").stdout.rstrip(),
            *(f"{name}: {network.describe_link(name)}" for name in (*HOSTS, *RACKS)),
            f"logs: {self.directory / 'log'}",
            f"use:  export SLURM_CONF={self.slurm_conf} (job files anywhere but /tmp)",
        ]
        return "\n".join(line for line in lines if line)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While a test session uses the cluster, others do not take it down."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "users").open("w") as users:
            fcntl.flock(users, fcntl.LOCK_SH)
            yield

    def is_used(self) -> bool:
        """Whether a test session is at work on it."""
        if not self.directory.exists():
            return False
        with (self.directory / "users").open("w") as users:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def down_if_unused(self) -> None:
        """As `down`, unless a test session uses it or a person brought it up."""
        if not self.directory.exists() or self.is_kept():
            return
        with (self.directory / "users").open("w") as users:
            try:
                # Held while it goes down: a session that starts meanwhile waits, then starts it.
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            self.down()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # Building

    def _build(self, racks: Mapping[str, Sequence[str]]) -> None:
        for name in ("spool", "state", "log", "pids", "munge", "jobs"):
            # State of an earlier cluster (jobs, nodes) would confuse this one.
            shutil.rmtree(self.directory / name, ignore_errors=True)
            (self.directory / name).mkdir(mode=0o755)
        key = self.directory / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._write_configuration(racks)
        network.build(self.directory, racks)

    def _write_configuration(self, racks: Mapping[str, Sequence[str]]) -> None:
        machine, here = socket.gethostname().split(".")[0], self.directory
        nodes = "\n".join(
            f"NodeName={host} NodeAddr={network.address(host)} CPUs={CORES} Sockets=2 "
            f"CoresPerSocket={CORES // 2} ThreadsPerCore=1 RealMemory=1024 "
            f"Gres=gpu:{len(GPU_FILES)} Feature={rack} State=UNKNOWN"
            for rack, hosts in racks.items()
            for host in hosts
        )
        self.slurm_conf.write_text(f"""\
ClusterName=psdist
SlurmctldHost={machine}({BRIDGE_ADDRESS})
SlurmctldPort={CONTROLLER_PORT}
SlurmdPort={HOST_PORT}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge/socket
CredType=cred/munge
MpiDefault=pmix
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
TopologyPlugin=topology/tree
GresTypes=gpu
ReturnToService=2
# A host may claim more cores than the machine has.
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
KillWait=3
MessageTimeout=30
SlurmdTimeout=120
JobCompType=jobcomp/none
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/pids/slurmctld.slurm
SlurmdPidFile={here}/pids/%n.slurm
SlurmctldLogFile={here}/log/slurmctld.log
SlurmdLogFile={here}/log/%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 OverSubscribe=YES State=UP
""")
        switches = [f"SwitchName={rack} Nodes={','.join(hosts)}" for rack, hosts in racks.items()]
        switches.append(f"SwitchName=spine Switches={','.join(racks)}")
        (here / "topology.conf").write_text("\n".join(switches) + "\n")
        gpus = [f"Name=gpu File={file}" for file in GPU_FILES]
        (here / "gres.conf").write_text("\n".join(gpus) + "\n")

    # Processes

    def _start(self) -> None:
        munge, log = self.directory / "munge", self.directory / "log"
        self._spawn(
            "munged", "munged", "--foreground", f"--socket={munge}/socket",
            f"--key-file={munge}/key", f"--pid-file={munge}/pid", f"--log-file={log}/munged.log",
            f"--seed-file={munge}/seed",
        )  # fmt: skip
        _wait_for((munge / "socket").exists, lambda: f"munged made no socket: see {log}")
        self._spawn("slurmctld", "slurmctld", "-D", "-f", str(self.slurm_conf))
        for host in HOSTS:
            # Every step replaces the one before it, so that the pid is slurmd's. (Not `ip netns
            # exec`: it hides /sys/fs/cgroup, and slurmd does not start without it.)
            self._spawn(
                host, "nsenter", f"--net=/run/netns/{network.namespace(host)}",
                "unshare", "--uts", "--mount",
                "sh", "-c",
                'hostname "$1" && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && '
                'exec slurmd -D -N "$1" -f "$2"',
                "sh", host, str(self.slurm_conf),
            )  # fmt: skip

    def _spawn(self, name: str, *argv: str) -> None:
        with (self.directory / "log" / f"{name}.out").open("wb") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                cwd="/",
                start_new_session=True,
            )
        pid_file = self.directory / "pids" / f"{name}.json"
        pid_file.write_text(json.dumps({"pid": process.pid, "started": _start_time(process.pid)}))

    def _wait_until_ready(self) -> None:
        _wait_for(
            lambda: self._states().count("up") == len(HOSTS),
            lambda: (
                f"not all hosts took up work within {READY_TIMEOUT_S:g} s (they are "
                f"{', '.join(self._states()) or 'unknown: slurmctld does not answer'}); "
                f"logs: {self.directory / 'log'}"
            ),
        )

    def _states(self) -> list[str]:
        """One word per host: "up", or what Slurm calls it."""
        shown = self._slurm("sinfo", "--noheader", "--Node", "--format=%T")
        taking_jobs = {"idle", "allocated", "mixed", "completing"}
        words = shown.stdout.split()
        return ["up" if word in taking_jobs else word for word in words]

    def _slurm(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return run(*argv, check=False, env=self.environment(), timeout_s=30)

    def _down(self) -> None:
        pid_files = sorted((self.directory / "pids").glob("*.json"))
        alive = {file.stem: pid for file in pid_files if (pid := _pid_if_alive(file)) is not None}
        # Jobs and slurmd first, in the hosts: munged and slurmctld must still answer them.
        inside = set()
        if network.other_owner(self.directory) is None:
            inside = {pid for host in HOSTS for pid in network.processes_in(host)}
        _end(inside | {pid for name, pid in alive.items() if name in HOSTS})
        _end({alive[name] for name in ("slurmctld",) if name in alive})
        _end({alive[name] for name in ("munged",) if name in alive})
        for file in pid_files:
            file.unlink()
        network.remove(self.directory)
        for name in ("slurm.conf", "cluster.json"):
            (self.directory / name).unlink(missing_ok=True)


def _pid_if_alive(pid_file: Path) -> int | None:
    """The pid in the file if that very process still runs, not another that got its number."""
    recorded = json.loads(pid_file.read_text())
    pid, started = int(recorded["pid"]), recorded["started"]
    return pid if started is not None and _start_time(pid) == started else None


def _start_time(pid: int) -> str | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _end(pids: set[int]) -> None:
    """SIGTERM, and SIGKILL for what has not gone in time."""
    started = {pid: _start_time(pid) for pid in pids}
    for number, patience_s in ((signal.SIGTERM, END_TIMEOUT_S), (signal.SIGKILL, END_TIMEOUT_S)):
        left = {pid for pid in pids if started[pid] and _start_time(pid) == started[pid]}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(_start_time(p) == started[p] for p in left):
            time.sleep(0.05)


def _wait_for(condition: Callable[[], bool], complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(complaint())
        time.sleep(0.2)
