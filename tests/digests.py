"""Digests of 200 virtual jobs and 10 MPI jobs: what a change must leave as it was.

    python -m tests.digests                  # play all, compare with tests/digests.json
    python -m tests.digests small/3 mpi      # single jobs, or whole families
    python -m tests.digests --write backup   # play a family and write its digests

A job has two digests. *bits* is of its parameters at the end: in sync without failures they never
change. Processors that add in another order give other bits, so the file says what plain torch gave
where they were written. Elsewhere bits are not compared: write them first, at the commit with which
you compare. *decisions* is of its histories (which update was applied when and to what, who joined,
left or failed, what each worker computed on), without checksums of values. They stay the same while
the sequence of messages does; a change of that must be meant, and is then proved by the check over
fresh seeds.

A job that is removed with a feature is deleted from FAMILIES and from tests/digests.json. MPI jobs
have only bits: which message comes first is not decided there. Progress messages go by the job's
clock, so virtual jobs give the same digests on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import numpy as np
import torch

from psdist.history import EventKind, Records
from psdist.history.writers import History, read_histories
from tests.protocol.codecs.test_codecs import BOTH_WAYS, Thirds
from tests.protocol.test_one_by_one import play as play_one_by_one
from tests.protocol.test_one_by_one import schedule_of as one_by_one
from tests.support.mpirun import run_mpi
from tests.support.programs.training.cases import Case, Outcome, cases_of
from tests.support.programs.training.random_scripts import RandomJob
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.coordinator_deaths import play_with_coordinator_death
from tests.support.virtual.going_on import play_with_groups_that_go_on
from tests.support.virtual.going_on_with_buddies import play_with_groups_and_servers
from tests.support.virtual.job import Schedule, VirtualJob, play
from tests.support.virtual.joining import play_with_joins
from tests.support.virtual.mode_buddies import play_with_mode_buddies
from tests.support.virtual.mode_deaths import play_with_mode_deaths
from tests.support.virtual.refills import play_refills
from tests.support.virtual.schedule import with_backup, with_modes, with_stale
from tests.support.virtual.server_deaths import play_with_server_death, with_buddies
from tests.support.virtual.shared_spares import play_with_shared_spares
from tests.support.virtual.spares import play_with_spares
from tests.support.virtual.successions import play_successions
from tests.support.virtual.surviving import play_with_deaths

DIGESTS = Path(__file__).with_suffix(".json")

TORCH = "plain torch"
"""The entry of the file that tells the processor on which it was written."""

Digest: TypeAlias = dict[str, str]
"""``bits`` and ``decisions``, in hexadecimal."""

FAMILIES: dict[str, tuple[Callable[[int], VirtualJob], int]] = {
    "small": (lambda seed: play(Schedule.from_seed(seed)), 40),
    "large": (lambda seed: play(Schedule.from_seed(seed, size="large")), 3),
    "codecs": (
        lambda seed: play(Schedule.from_seed(seed), wire=BOTH_WAYS, make_worker=Thirds),
        12,
    ),
    "modes": (lambda seed: play(with_modes(seed)), 12),
    "backup": (lambda seed: play(with_backup(seed)), 12),
    "stale": (lambda seed: play(with_stale(seed)), 12),
    "one-by-one": (lambda seed: play_one_by_one(one_by_one(seed)), 6),
    "workers-die": (play_with_deaths, 8),
    "modes-and-deaths": (play_with_mode_deaths, 4),
    "servers-die": (lambda seed: play_with_server_death(with_buddies(seed))[0], 8),
    "modes-and-servers": (play_with_mode_buddies, 3),
    "registrar-dies": (lambda seed: play_with_coordinator_death(seed)[0], 5),
    "groups-go-on": (play_with_groups_that_go_on, 8),
    "groups-and-servers": (play_with_groups_and_servers, 4),
    "refills": (play_refills, 4),
    "spares": (play_with_spares, 4),
    "joins": (play_with_joins, 4),
    "shared-spares": (play_with_shared_spares, 4),
    "successions": (play_successions, 3),
}
"""Name -> how a seed is played on loops and shards without scripts, and how many seeds."""

SCRIPTS = (
    *("ssp_cases", "group_cases", "codec_cases", "freezing_cases", "rounds_cases"),
    *("by_pass_cases", "by_speed_cases", "by_loss_cases", "pipelined_rounds_cases"),
)
"""Modules of training cases that are played by their names, with real Jobs."""
NOT_VIRTUAL = ("torch-", "mpi-", "in-the-group")
"""Cases of another tier of groups, which a virtual job has not, and of torch.distributed."""
NUM_RANDOM = 8

EVENT_FIELDS = ("clock", "weight", "lr_scale", "chunk", "group", "kind", "flags", "codec")
USE_FIELDS = ("iteration", "reply", "position", "chunk", "server")

QUICK = (
    *("small/1", "small/2", "small/8", "codecs/1", "modes/1", "backup/1", "stale/1"),
    *("workers-die/1", "servers-die/1", "groups-go-on/1", "spares/1", "joins/1"),
)
"""Those of every test run."""

OVER_MPI = (
    *(f"sync_cases/{optimizer}-2-groups-1-servers-first-run" for optimizer in ("sgd", "adamw")),
    *(f"sync_cases/{optimizer}-3-groups-1-servers-first-run" for optimizer in ("sgd", "adamw")),
    *(f"sync_cases/{optimizer}-3-groups-3-servers-first-run" for optimizer in ("sgd", "adamw")),
    *("group_cases/trained-sgd", "group_cases/trained-adamw"),
    *("group_cases/three-and-one", "codec_cases/exact-sync"),
)


# Digests


def digest_of(job: VirtualJob) -> Digest:
    """Return the digest of a job without scripts: of the parameters at servers that live."""
    bits, decisions = hashlib.sha256(), hashlib.sha256()
    for each in job.sets:
        for chunk in range(len(each.owners)):
            if each.has_values_of(chunk):
                bits.update(each.parameters_of(chunk).numpy().tobytes())
        decisions.update(decisions_in(each.history()))
    return {"bits": bits.hexdigest()[:32], "decisions": decisions.hexdigest()[:32]}


def digest_of_outcome(outcome: Outcome, *, has_decisions: bool = True) -> Digest:
    """Return the digest of a job with scripts: of the tensors that these returned."""
    bits, decisions = hashlib.sha256(), hashlib.sha256()
    for tensor in tensors_in(outcome.results):
        bits.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    digest = {"bits": bits.hexdigest()[:32]}
    if has_decisions:
        for history in read_histories(outcome.path):
            decisions.update(decisions_in(history))
        digest["decisions"] = decisions.hexdigest()[:32]
    return digest


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value):
            yield from tensors_in(value[key])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def decisions_in(history: History) -> bytes:
    """Return the bytes of all records, without the checksums of values."""
    found = []
    for log in history.servers:
        events = log.events.copy()
        events["weight"][np.isin(events["kind"], (EventKind.LOAD, EventKind.SNAPSHOT))] = 0
        found += [log.server.to_bytes(4, "little"), *_columns(events, EVENT_FIELDS)]
    for each in history.workers:
        found += [each.worker.to_bytes(4, "little"), *_columns(each.uses, USE_FIELDS)]
    return b"".join(found)


def _columns(records: Records, fields: Sequence[str]) -> list[bytes]:
    return [records[field].tobytes() for field in fields]


# Jobs


def virtual_jobs() -> dict[str, Callable[[], Digest]]:
    """Return by name what plays each virtual job and gives its digest."""
    jobs: dict[str, Callable[[], Digest]] = {}
    for family, (played, count) in FAMILIES.items():
        for seed in range(count):
            jobs[f"{family}/{seed}"] = partial(
                lambda play, seed: digest_of(play(seed)), played, seed
            )
    cases = [
        (module.removesuffix("_cases"), case) for module in SCRIPTS for case in cases_of(module)
    ]
    cases += [("random", RandomJob.of(seed).case) for seed in range(NUM_RANDOM)]
    for family, case in cases:
        if not case.name.startswith(NOT_VIRTUAL):
            jobs[f"{family}/{case.name}"] = partial(play_scripts, case)
    return jobs


def play_scripts(case: Case) -> Digest:
    # However short backward passes are: whether a bucket is worth it goes by the real clock.
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        mock.patch("psdist.workers.early.overlap.BACKWARD_S", 0.0),
        mock.patch("psdist.workers.early.group_overlap.BUCKET_S", 0.0),
    ):
        return digest_of_outcome(run_virtually(case, Path(folder) / "run", seed=1))


def play_over_mpi(names: Sequence[str]) -> dict[str, Digest]:
    """Play these cases in one mpirun."""
    wanted = [name.removeprefix("mpi/") for name in names]
    cases = {
        f"{module}/{case.name}": case for module in _modules(wanted) for case in cases_of(module)
    }
    with tempfile.TemporaryDirectory() as folder:
        program = ["-W", "error", "-m", "tests.support.programs.training.run_cases", folder]
        most = max(cases[name].num_ranks for name in wanted)
        done = run_mpi(most, [*program, *wanted], timeout_s=600)
        if done.returncode:
            raise SystemExit(done.text)
        outcomes = {
            name: Outcome(path=Path(folder) / name, num_workers=cases[name].num_workers)
            for name in wanted
        }
        return {
            f"mpi/{name}": digest_of_outcome(outcome, has_decisions=False)
            for name, outcome in outcomes.items()
        }


def _modules(names: Sequence[str]) -> list[str]:
    return sorted({name.partition("/")[0] for name in names})


def all_names() -> list[str]:
    return [*virtual_jobs(), *(f"mpi/{name}" for name in OVER_MPI)]


def play_all(names: Sequence[str]) -> dict[str, Digest]:
    jobs = virtual_jobs()
    digests = {name: jobs[name]() for name in names if not name.startswith("mpi/")}
    over_mpi = [name for name in names if name.startswith("mpi/")]
    return digests | (play_over_mpi(over_mpi) if over_mpi else {})


def bits_of_plain_torch() -> str:
    """Return what tells processors apart: a digest of a model that torch alone trains."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(67, 129), torch.nn.Tanh(), torch.nn.Linear(129, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(33, 67)).square().mean().backward()
        optimizer.step()
    values = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(values).hexdigest()[:16]


def differences(
    found: Mapping[str, Digest], recorded: Mapping[str, Digest], *, has_bits: bool = True
) -> list[str]:
    """Return a line for each job whose digest is not the one recorded."""
    lines = []
    for name, digest in found.items():
        kinds = [
            kind
            for kind in digest
            if (has_bits or kind != "bits") and digest[kind] != recorded.get(name, {}).get(kind)
        ]
        if kinds:
            lines.append(f"{name}: other {' and '.join(kinds)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.digests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="a job, or a family of them")
    parser.add_argument("--write", action="store_true", help="write the digests")
    given = parser.parse_args()
    logging.getLogger("psdist").addHandler(logging.NullHandler())
    torch.set_num_threads(1)
    every = all_names()
    names = [
        name
        for name in every
        if not given.jobs or any(name == each or name.startswith(f"{each}/") for each in given.jobs)
    ]
    if not names:
        parser.error(f"no such job: {' '.join(given.jobs)}")
    recorded = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    torch_bits = {"bits": bits_of_plain_torch()}
    has_bits = recorded.get(TORCH) == torch_bits
    if given.write and given.jobs and not has_bits:
        parser.error("the file is of a processor with other arithmetic: write all jobs")
    found = play_all(names)
    different = differences(found, recorded, has_bits=has_bits)
    print(*different, f"{len(found) - len(different)} of {len(found)} jobs as recorded", sep="\n")
    if not has_bits:
        print("the recorded bits are of a processor with other arithmetic: not compared")
    if given.write:
        kept = recorded | found if has_bits else found
        ordered = {TORCH: torch_bits} | {name: kept[name] for name in every if name in kept}
        DIGESTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        return 0
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
