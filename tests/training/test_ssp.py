"""Bounded and unbounded staleness: fast groups really run ahead, and never further than allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from psdist.history.writers import EventKind
from tests.support.programs.training import ssp_cases
from tests.support.programs.training.cases import Outcome
from tests.support.programs.training.problems import flat, relative_distance, train
from tests.support.programs.training.virtual_job import run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "ssp_cases"
BOUNDS = ssp_cases.BOUNDS
ITERATIONS = ssp_cases.ITERATIONS
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)


def virtually(name: str, path: Path, *, seed: int = 0, link: LinkModel | None = WILD) -> Outcome:
    (case,) = (case for case in ssp_cases.CASES if case.name == name)
    return run_virtually(case, path, seed=seed, link=link)


def assert_ahead_within(outcome: Outcome, bound: int | None) -> None:
    """Proved; and the fast groups have used parameters that lacked updates of the slow one."""
    report = outcome.checked()
    seen = {int(key): n for key, n in outcome.summary["staleness_seen"].items()}
    assert seen == report.staleness
    assert outcome.summary["max_staleness_seen"] == max(seen)
    assert outcome.summary["clocks"] == [ITERATIONS] * len(outcome.results)
    if bound is not None:
        assert max(seen) <= bound, seen
    if bound != 0:
        assert sum(n for staleness, n in seen.items() if staleness > 0) > 0, seen


@pytest.mark.mpi
@pytest.mark.parametrize("bound", BOUNDS)
def test_no_group_runs_further_ahead_of_a_slow_one_than_the_bound(
    outcomes: dict[str, Outcome], bound: int
) -> None:
    assert_ahead_within(outcomes[f"slow-ssp-{bound}"], bound)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bound", BOUNDS)
def test_the_bound_holds_on_a_network_that_reorders_and_repeats(
    bound: int, seed: int, tmp_path: Path
) -> None:
    assert_ahead_within(virtually(f"slow-ssp-{bound}", tmp_path, seed=seed), bound)


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["collectives-ssp-4", "pipelined-ssp-4"])
def test_collectives_and_pulls_within_training_keep_the_bound(
    outcomes: dict[str, Outcome], name: str
) -> None:
    assert_ahead_within(outcomes[name], 4)


@pytest.mark.parametrize("seed", range(4))
def test_collectives_keep_the_bound_on_a_network_that_reorders_and_repeats(
    seed: int, tmp_path: Path
) -> None:
    assert_ahead_within(virtually("collectives-ssp-4", tmp_path, seed=seed), 4)


def updates_when_finished(outcome: Outcome, group: int, iterations: int) -> int:
    """The least number of updates that any chunk held when ``group`` had finished so many."""
    least = []
    for log in outcome.history.servers:
        applies = log.events[log.events["kind"] == EventKind.APPLY]
        for chunk in np.unique(applies["chunk"]):
            of_chunk = applies[applies["chunk"] == chunk]
            own = (of_chunk["group"] == group) & (of_chunk["clock"] == iterations - 1)
            least.append(1 + int(np.flatnonzero(own)[0]))
    return min(least)


@pytest.mark.mpi
def test_async_applies_more_updates_than_sync_while_a_slow_group_makes_ten(
    outcomes: dict[str, Outcome],
) -> None:
    outcome = outcomes["slow-async"]
    assert_ahead_within(outcome, None)
    num_updates = updates_when_finished(outcome, group=1, iterations=10)
    assert num_updates > 20, f"{num_updates} updates; sync has 20 by then"


@pytest.mark.parametrize("seed", range(4))
def test_async_lets_a_fast_group_make_three_iterations_to_one_of_a_slow_group(
    seed: int, tmp_path: Path
) -> None:
    # On a virtual clock this is no matter of luck: sleeps are all the time that passes.
    outcome = virtually("slow-async", tmp_path, seed=seed, link=LinkModel(jitter_s=1e-5))
    assert_ahead_within(outcome, None)
    assert 36 <= updates_when_finished(outcome, group=1, iterations=10) <= 40


def plain_sgd_parameters(iterations: int) -> torch.Tensor:
    model = ssp_cases.PROBLEM.model()
    batches = ssp_cases.PROBLEM.batches(size=24, count=iterations)
    train(model, ssp_cases.plain_sgd(model), batches)
    return flat(model)


def parameters(outcome: Outcome) -> torch.Tensor:
    found: torch.Tensor = outcome.results[0]["parameters"]
    return found


@pytest.mark.mpi
def test_plain_sgd_with_bound_0_is_sync_but_for_rounding(outcomes: dict[str, Outcome]) -> None:
    sync, ssp = parameters(outcomes["plain-sync"]), parameters(outcomes["plain-ssp-0"])
    for name in ("plain-sync", "plain-ssp-0"):
        assert outcomes[name].checked().max_staleness == 0
    ratio = relative_distance(ssp, sync)
    assert ratio <= 1e-5, f"norm(ssp - sync) / norm(sync) = {ratio:.2e}"
    ratio = relative_distance(ssp, plain_sgd_parameters(50))
    assert ratio <= 1e-5, f"norm(ssp - plain) / norm(plain) = {ratio:.2e}"


@pytest.mark.parametrize("seed", range(4))
def test_plain_sgd_with_bound_0_is_sync_whatever_arrives_first(seed: int, tmp_path: Path) -> None:
    ssp = parameters(virtually("plain-ssp-0", tmp_path, seed=seed))
    ratio = relative_distance(ssp, plain_sgd_parameters(50))
    assert ratio <= 1e-5, f"norm(ssp - plain) / norm(plain) = {ratio:.2e}"


def assert_moves_as_far(ssp: Outcome, sync: Outcome) -> None:
    """Far from converged, Adam's steps depend on lr alone: unscaled, four groups would move four
    times as far."""
    ratio = ssp.results[0]["movement"] / sync.results[0]["movement"]
    assert 0.9 <= ratio <= 1.1, f"movement in ssp / movement in sync = {ratio:.3f}"


@pytest.mark.mpi
def test_adam_moves_as_far_per_clock_as_in_sync(outcomes: dict[str, Outcome]) -> None:
    assert_moves_as_far(outcomes["adam-ssp-3"], outcomes["adam-sync"])


@pytest.mark.parametrize("seed", range(2))
def test_adam_moves_as_far_per_clock_as_in_sync_in_any_schedule(seed: int, tmp_path: Path) -> None:
    ssp = virtually("adam-ssp-3", tmp_path / "ssp", seed=seed)
    assert_moves_as_far(ssp, virtually("adam-sync", tmp_path / "sync", seed=seed))


def assert_nobody_waited(outcome: Outcome) -> None:
    assert outcome.summary["clocks"] == [ITERATIONS, 12, ITERATIONS]
    assert [result["clock"] for result in outcome.results] == [ITERATIONS, 12, ITERATIONS]
    outcome.checked()


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["ssp", "sync"])
def test_nobody_waits_for_a_group_that_has_finished(
    outcomes: dict[str, Outcome], mode: str
) -> None:
    assert_nobody_waited(outcomes[f"leaving-{mode}"])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["ssp", "sync"])
def test_nobody_waits_for_a_group_that_has_finished_in_any_schedule(
    mode: str, seed: int, tmp_path: Path
) -> None:
    assert_nobody_waited(virtually(f"leaving-{mode}", tmp_path, seed=seed))


def plain_parameters_after_a_leave() -> torch.Tensor:
    model = ssp_cases.PROBLEM.model()
    optimizer = ssp_cases.plain_sgd(model)
    joint = list(ssp_cases.PROBLEM.batches(size=24, count=ITERATIONS))
    train(model, optimizer, joint[:12])
    kept = torch.tensor([*range(8), *range(16, 24)])  # without worker 1's part
    train(model, optimizer, [(x[kept], y[kept]) for x, y in joint[12:]])
    return flat(model)


@pytest.mark.mpi
def test_sync_goes_on_with_the_mean_of_the_groups_that_are_left(
    outcomes: dict[str, Outcome],
) -> None:
    ratio = relative_distance(
        parameters(outcomes["leaving-sync"]), plain_parameters_after_a_leave()
    )
    assert ratio <= 1e-5, f"norm(a - b) / norm(b) = {ratio:.2e}"


def test_staleness_counts_what_is_in_memory_after_a_save(tmp_path: Path) -> None:
    # A save pulls newer parameters beside those that are trained on.
    case = ssp_cases.case("save", ssp_cases.saving(), mode="async", groups=2)
    outcome = run_virtually(case, tmp_path, link=LinkModel(jitter_s=1e-5))
    assert_ahead_within(outcome, None)
