"""Kills by rank, moment and mode: each cell is a training of its own, to its end.

    python -m tests.benchmarks.deaths.kill_matrix --json FILE                    # on this host
    python -m tests.benchmarks.deaths.kill_matrix --hosts 4 --phases pushing --json FILE
    python -m tests.benchmarks.deaths.kill_matrix --table FILE [FILE ...]

Three servers with buddies, the standby among them, and three workers (five on the four hosts of the
Slurm test cluster, which is brought up and taken down; root, docs/dev/tests.md) train
tests/support/programs/deaths/struck_script.py under ``mpirun --with-ft ulfm``;
tests/support/strikes.py says what the phases are and who is killed. A job that has not ended with
status 0 is started again, once, with the same words. Each cell reports how the jobs have ended,
whether `psdist check` proves the record, and the seconds from the kill until all workers that live
have made another iteration. ``--json`` adds to what the file has.

Exit status 0 where every cell ended as docs/guides/failures.md says: the first job with status 0,
or where a rank fails that registers, the second; proved; and no process was left.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from psdist.commands.check import check_run
from psdist.errors import PsdistError
from psdist.history.writers import read_histories
from tests.benchmarks.placing.taken_cluster import taken_cluster
from tests.support.mpirun import REPOSITORY, run_mpi
from tests.support.slurm.cluster import SlurmCluster
from tests.support.strikes import NEVER, PHASES, VARIABLE, VICTIMS, mark_of

MODES = {"sync": "--mode sync", "ssp": "--mode ssp --staleness 2", "async": "--mode async"}
SERVERS, WORKERS = 3, {1: 3, 4: 5}
"""The workers by the number of hosts."""
LIMIT_S = 90
STARTS_AGAIN = "registering"
"""The phase in which a death ends the job."""
ULFM = ("--with-ft", "ulfm")


@dataclass(frozen=True, kw_only=True)
class Cell:
    phase: str
    victim: str
    mode: str

    def __str__(self) -> str:
        return f"{self.victim}, {self.phase}, {self.mode}"

    @property
    def may_start_again(self) -> bool:
        return self.phase == STARTS_AGAIN

    def environment(self, run_dir: Path) -> dict[str, str]:
        return {VARIABLE: f"{self.phase} {self.victim}", "PSDIST_RUN_DIR": str(run_dir)}

    def words(self) -> list[str]:
        """What follows ``python``."""
        settings = ["max_deaths=1", "replication=buddy", "chunk_bytes=4096", "progress=off"]
        return [
            *("-m", "tests.support.programs.deaths.struck", "run", *MODES[self.mode].split()),
            *("--group", "rank", "--servers", str(SERVERS), "--record", "--resume"),
            *("--checkpoint-every", "10", *(f"--set={each}" for each in settings)),
            *("-m", "tests.support.programs.deaths.struck_script"),
        ]


@dataclass(frozen=True, kw_only=True)
class Played(Cell):
    hosts: int
    statuses: tuple[int, ...]
    """Status of the first job, and of the second if there was one."""
    was_killed: bool
    is_complete: bool
    """Whether summary.json says so."""
    is_proved: bool
    went_on_s: float | None
    """From the kill until each worker that lives had made another iteration; None where there was
    none to make."""
    seconds: float
    said: str
    """The last line of psdist's of the first job, where that has not ended with status 0."""
    is_clean: bool = True
    """Whether it ended in time and left no process."""

    @property
    def is_good(self) -> bool:
        has_ended_well = self.statuses[-1:] == (0,) and (
            len(self.statuses) == 1 or self.may_start_again
        )
        return has_ended_well and all(
            (self.was_killed, self.is_complete, self.is_proved, self.is_clean)
        )

    @property
    def cell(self) -> Cell:
        return Cell(phase=self.phase, victim=self.victim, mode=self.mode)


def cells(phases: Iterable[str], victims: Iterable[str], modes: Iterable[str]) -> list[Cell]:
    return [
        Cell(phase=phase, victim=victim, mode=mode)
        for phase in phases
        for victim in victims
        for mode in modes
        if (phase, mode) not in NEVER
    ]


def went_on_s(run_dir: Path, killed_s: float) -> float | None:
    """``killed_s``: on the clock of ``time.time``, as the lines of metrics.jsonl are."""
    next_s: dict[int, float] = {}
    for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines():
        told = json.loads(line)
        if told["at"] > killed_s:
            next_s.setdefault(told["worker"], told["at"])
    return round(max(next_s.values()) - killed_s, 3) if next_s else None


def judged(
    run_dir: Path,
    cell: Cell,
    *,
    hosts: int,
    statuses: Sequence[int],
    seconds: float,
    output: str,
    is_clean: bool = True,
) -> Played:
    """``output``: of the first job."""
    is_proved, is_complete, mark = False, False, mark_of(run_dir)
    try:
        is_proved = check_run(run_dir, read_histories(run_dir)).proved
    except PsdistError as error:
        print(f"{cell}: {error}", flush=True)
    if (summary := run_dir / "summary.json").exists():
        is_complete = json.loads(summary.read_text("utf-8"))["exit"] == "completed"
    lines = output.strip().splitlines()
    said = next((each for each in reversed(lines) if each.startswith("psdist:")), "")
    has_gone_on = mark.exists() and len(statuses) == 1 and (run_dir / "metrics.jsonl").exists()
    return Played(
        **asdict(cell),
        hosts=hosts,
        statuses=tuple(statuses),
        was_killed=mark.exists(),
        is_complete=is_complete,
        is_proved=is_proved,
        went_on_s=went_on_s(run_dir, json.loads(mark.read_text())["at"]) if has_gone_on else None,
        seconds=round(seconds, 1),
        said=said if tuple(statuses[:1]) != (0,) else "",
        is_clean=is_clean,
    )


# -- on this host ----------------------------------------------------------------------------------


def play(cell: Cell, folder: Path) -> Played:
    """Play in a new ``folder``, which also gets the output."""
    run_dir, statuses, texts, is_clean = folder / "run", list[int](), list[str](), True
    begun_s = time.monotonic()
    while not statuses or (statuses[-1] and len(statuses) < 2):
        try:
            done = run_mpi(
                SERVERS + WORKERS[1],
                cell.words(),
                timeout_s=LIMIT_S,
                env={**cell.environment(run_dir), "PYTHONPATH": str(REPOSITORY)},
                launcher_args=ULFM,
            )
        except AssertionError as error:  # it hangs, or has left a process
            texts.append(str(error))
            is_clean = False
            break
        statuses.append(done.returncode)
        texts.append(done.stdout + done.stderr)
    seconds = time.monotonic() - begun_s
    (folder / "output.txt").write_text("\n".join(texts))
    return judged(
        run_dir,
        cell,
        hosts=1,
        statuses=statuses,
        seconds=seconds,
        output=texts[0],
        is_clean=is_clean,
    )


# -- on four ---------------------------------------------------------------------------------------


def job_script(folder: Path, plays: Sequence[Cell]) -> str:
    lines = ["#!/bin/sh", 'export PATH="$VENV/bin:$PATH"']
    for number, cell in enumerate(plays):
        place = folder / str(number)
        run_dir = place / "run"
        ranks = SERVERS + WORKERS[4]
        words = [
            *("env", *(f"{key}={value}" for key, value in cell.environment(run_dir).items())),
            *f"timeout -k 5 {LIMIT_S} mpirun -n {ranks} --bind-to none".split(),
            *(*ULFM, "python", *cell.words()),
        ]
        job = f"{shlex.join(words)} >{place}/output"
        lines += [
            f"mkdir {place}; began=$(date +%s)",
            f"{job}-0.txt 2>&1; first=$?; second=",
            f'[ "$first" = 0 ] || {{ {job}-1.txt 2>&1; second=$?; }}',
            f'echo "$(($(date +%s) - began)) $first $second" >{place}/ended.txt',
        ]
    return "\n".join([*lines, ""])


def play_on_four(plays: Sequence[Cell], cluster: SlurmCluster, keep: Path | None) -> list[Played]:
    folder = cluster.directory("matrix")
    script = folder / "job.sbatch"
    script.write_text(job_script(folder, plays))
    done = cluster.sbatch(
        script,
        sbatch_args=["--nodes=4", "--ntasks-per-node=2"],
        timeout_s=60 + 2 * LIMIT_S * len(plays),
        env={"PYTHONPATH": str(REPOSITORY)},
    )
    if done.returncode:
        print(done.text)
    found = []
    for number, cell in enumerate(plays):
        place = folder / str(number)
        seconds, *statuses = map(int, (place / "ended.txt").read_text().split())
        output = (place / "output-0.txt").read_text(errors="replace")
        found.append(
            judged(place / "run", cell, hosts=4, statuses=statuses, seconds=seconds, output=output)
        )
        if keep and not found[-1].is_good:
            shutil.copytree(place, keep / _folder_name(cell))
    return found


# -- what is told ----------------------------------------------------------------------------------


def _folder_name(cell: Cell) -> str:
    return str(cell).replace(", ", "-").replace(" ", "-")


def load(path: Path) -> list[Played]:
    if not path.exists():
        return []
    told = json.loads(path.read_text("utf-8"))
    return [Played(**{**each, "statuses": tuple(each["statuses"])}) for each in told]


def store(path: Path, plays: Sequence[Played]) -> None:
    """``plays`` instead of those of the same cells that the file has."""
    mine = {(each.cell, each.hosts) for each in plays}
    kept = [each for each in load(path) if (each.cell, each.hosts) not in mine]
    told = sorted([*kept, *plays], key=_place)
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in told) + "\n]\n")


def _place(each: Played) -> tuple[int, int, int, int]:
    where = PHASES.index(each.phase), list(VICTIMS).index(each.victim), list(MODES).index(each.mode)
    return (each.hosts, *where)


def table(plays: Sequence[Played]) -> str:
    """Return a Markdown table: for each phase and victim the result of the job, by mode."""
    found = {(each.phase, each.victim, each.mode): each for each in plays}
    lines = [f"| | {' | '.join(VICTIMS)} |", "|---" * (1 + len(VICTIMS)) + "|"]
    for phase in PHASES:
        row = []
        for victim in VICTIMS:
            of_modes = [
                _words(found.get((phase, victim, mode)))
                for mode in MODES
                if (phase, mode) not in NEVER
            ]
            same = len(set(of_modes)) == 1
            row.append(of_modes[0] if same else " / ".join(of_modes))
        lines.append(f"| {phase} | {' | '.join(row)} |")
    return "\n".join(lines)


def _words(each: Played | None) -> str:
    if each is None:
        return "–"
    if not each.is_good:
        return "**not as it should**"
    if len(each.statuses) > 1:
        return "again"
    return "on" if each.went_on_s is None else f"{each.went_on_s:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, choices=WORKERS, default=1)
    for name, every in (("phases", PHASES), ("victims", VICTIMS), ("modes", MODES)):
        parser.add_argument(f"--{name}", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="only what the file has not")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where the folders of cells go that fell")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    given = parser.parse_args()
    if given.table:
        print(table([each for path in given.table for each in load(path)]))
        return 0
    plays = cells(given.phases, given.victims, given.modes)
    if given.missing:
        had = {each.cell for each in load(given.json) if each.is_good and each.hosts == given.hosts}
        plays = [each for each in plays if each not in had]
    found: list[Played] = []
    if given.hosts > 1 and plays:
        with taken_cluster(shape="1gbit") as cluster:
            found = play_on_four(plays, cluster, given.keep)
    for cell in plays if given.hosts == 1 else []:
        folder = Path(tempfile.mkdtemp(prefix="psdist-kills-"))
        found.append(play(cell, folder))
        if given.keep and not found[-1].is_good:
            shutil.move(folder, given.keep / _folder_name(cell))
        else:
            shutil.rmtree(folder)
        if given.json:
            store(given.json, found)
        print(repr(found[-1]), "" if found[-1].is_good else "  <-- not as it should", flush=True)
    if given.hosts > 1:
        print(*map(repr, found), sep="\n", flush=True)
        if given.json:
            store(given.json, found)
    bad = [each for each in found if not each.is_good]
    print(f"{len(found) - len(bad)} of {len(found)} as they should")
    print(f"longest until all continued: {max((e.went_on_s or 0 for e in found), default=0)} s")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
