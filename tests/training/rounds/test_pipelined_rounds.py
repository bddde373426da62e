"""``pipeline = 1`` with local steps: a round's replies are worked in at the end of the next one,
and nothing of what groups have come to is lost or counts twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist.errors import InvariantError
from psdist.job import Job
from psdist.workers.rounds.differences import LocalDifferences
from psdist.workers.rounds.local_steps import LocalSteps
from tests.support.late_transfers import on_a_device
from tests.support.programs.training import by_pass_cases
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat
from tests.support.programs.training.virtual_job import JobFailedError, run_virtually
from tests.support.virtual.network import LinkModel

OVER_MPI = "pipelined_rounds_cases"
PROBLEM = by_pass_cases.PROBLEM
STEPS = 16
SIZE = 8
WILD = LinkModel(latency_s=1e-5, jitter_s=2e-3, duplicate_rate=0.05)
Make = Callable[[Any], torch.optim.Optimizer]
Groups = tuple[tuple[int, ...], ...]
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def run(script: Script, path: Path, *, seed: int = 0, **settings: Any) -> Outcome:
    groups, resumes = settings.pop("groups", ((0,),)), settings.pop("resumes", False)
    given = {
        "mode": "async",
        "pipeline": 1,
        "local_steps": 4,
        "record": True,
        "checksum_every": 1,
        **settings,
    }
    case = Case(name="rounds", script=script, groups=groups, servers=2, settings=given)
    outcome = run_virtually(case, path, seed=seed, link=WILD, resumes=resumes)
    if given["record"]:
        outcome.checked()
    return outcome


def training(
    make: Make = sgd,
    after_step: Callable[[Job, nn.Module, int], None] = lambda *_: None,
    *,
    max_norm: float | None = None,
) -> Script:
    """Memory content after each step, and at the end."""

    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, make(model.parameters()), max_grad_norm=max_norm)
        behind = []
        for step, (x, y) in enumerate(
            PROBLEM.batches(size=SIZE, count=STEPS, part=job.worker, num_parts=job.num_workers)
        ):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            stage.sleep(1e-3 * (1 + job.group))
            optimizer.step()
            behind.append(flat(model))
            after_step(job, model, step)
        job.barrier()
        job.pull()  # what slower groups have brought since, too
        return {"parameters": flat(model), "behind": behind, "clock": job.clock}

    return script


def vector(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def one_group(
    make_outer: Make, *, num_workers: int, local_steps: int = 4, lands: Sequence[int] = ()
) -> list[Tensor]:
    """Memory of such a group after each step, by torch alone: the servers' optimizer
    steps at each round's end, and its result of the round before is what the group takes over.
    ``lands``: steps with a collective after them, so that nothing is outstanding."""
    model = PROBLEM.model()
    inner = sgd(model.parameters())
    servers = PROBLEM.model()
    outer = make_outer(servers.parameters())
    parts = [
        list(PROBLEM.batches(size=SIZE, count=STEPS, part=part, num_parts=num_workers))
        for part in range(num_workers)
    ]
    began, awaited, in_round, behind = vector(model), None, 0, []
    for step in range(STEPS):
        model.zero_grad()
        for part in parts:
            x, y = part[step]
            (nn.functional.cross_entropy(model(x), y) / num_workers).backward()
        inner.step()
        in_round += 1
        if in_round == local_steps:
            brought, in_round = vector(model) - began, 0
            if awaited is not None:
                torch.nn.utils.vector_to_parameters(awaited + brought, model.parameters())
            awaited = pushed(servers, outer, brought)
            began = vector(model)
        behind.append(flat(model))
        if step in lands:
            if in_round:
                awaited = pushed(servers, outer, vector(model) - began)
            assert awaited is not None
            torch.nn.utils.vector_to_parameters(awaited.clone(), model.parameters())
            began, awaited, in_round = vector(model), None, 0
    if in_round:
        awaited = pushed(servers, outer, vector(model) - began)
    return [*behind, flat(servers)]


def pushed(servers: nn.Module, outer: torch.optim.Optimizer, brought: Tensor) -> Tensor:
    for parameter, part in zip(
        servers.parameters(),
        brought.split([each.numel() for each in servers.parameters()]),
        strict=True,
    ):
        parameter.grad = -part.view_as(parameter)
    outer.step()
    return vector(servers)


OUTERS: dict[str, Make] = {
    "average": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
    "adam:lr=0.01": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("call", ["none", "mean", "pull"])
def test_a_group_has_the_reply_of_the_round_before_and_its_own_progress(
    call: str, num_workers: int, outer: str, tmp_path: Path
) -> None:
    """A collective, or a pull, in the middle of a round with a reply outstanding."""

    def after_step(job: Job, _model: nn.Module, step: int) -> None:
        if step == 9 and call == "mean":
            job.mean(1.0)
        elif step == 9 and call == "pull":
            job.pull()

    groups = (tuple(range(num_workers)),)
    outcome = run(training(sgd, after_step), tmp_path, groups=groups, outer=outer)
    lands = () if call == "none" else (9,)
    *behind, last = one_group(OUTERS[outer], num_workers=num_workers, lands=lands)
    for result in outcome.results:
        for step, (ours, plain) in enumerate(zip(result["behind"], behind, strict=True)):
            assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-6), step
        assert torch.allclose(result["parameters"], last, rtol=1e-4, atol=1e-6)
        assert result["clock"] == (4 if call == "none" else 5)
    assert outcome.summary["recorded"]["pipeline"] == 1


def test_with_average_a_group_that_is_alone_trains_as_if_nothing_were_sent(
    tmp_path: Path,
) -> None:
    model = PROBLEM.model()
    optimizer = sgd(model.parameters())
    (result,) = run(training(), tmp_path).results
    for (x, y), ours in zip(PROBLEM.batches(size=SIZE, count=STEPS), result["behind"], strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert torch.allclose(ours, flat(model), rtol=1e-4, atol=1e-6)


def steady(parameters: Any) -> torch.optim.Optimizer:
    """Every step is of the same length, whatever the gradient."""
    return Steady(parameters, lr=1.0)


class Steady(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(self.param_groups[0]["lr"])
        return closure


Steady.__module__, Steady.__qualname__ = "torch.optim", "SGD"


@pytest.mark.parametrize(
    "settings", [{}, {"mode": "ssp", "staleness": 1}, {"mode": "ssp", "staleness": 4}], ids=str
)
@pytest.mark.parametrize("groups", [((0,), (1,), (2,)), ((0, 1), (2,))], ids=["alone", "of-two"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_group_s_progress_is_lost_or_counts_twice(
    seed: int, groups: Groups, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each group moves by as much, so the mean of where they have come to is known, whatever the
    order."""
    outcome = run(training(steady), tmp_path, seed=seed, groups=groups, **settings)
    start = flat(PROBLEM.model())
    for result in outcome.results:
        moved = result["parameters"] - start
        assert torch.allclose(moved, torch.full_like(moved, STEPS), atol=1e-4)
    assert outcome.summary["max_staleness_seen"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{"mode": "ssp", "staleness": 2}, {"mode": "async"}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_groups_come_to_where_they_come_without_it(
    seed: int, mode: dict[str, Any], tmp_path: Path
) -> None:
    groups = ((0, 1), (2,), (3,))
    late = run(training(), tmp_path / "late", groups=groups, seed=seed, **mode)
    plain = run(training(), tmp_path / "plain", groups=groups, seed=seed, pipeline=0, **mode)
    start = flat(PROBLEM.model())
    wanted = plain.results[0]["parameters"] - start
    for result in late.results:
        moved = result["parameters"] - start
        assert 0.5 < float(moved.norm() / wanted.norm()) < 2.0
        assert float(moved @ wanted / moved.norm() / wanted.norm()) > 0.8


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_on_a_device_has_the_same_rounds(
    seed: int, num_workers: int, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"groups": (tuple(range(num_workers)),), "seed": seed}
    with on_a_device(seed=seed, rate=0.5) as devices:
        there = run(training(), tmp_path / "device", **given)
    here = run(training(), tmp_path / "cpu", **given)
    for ours, plain in zip(there.results, here.results, strict=True):
        assert torch.equal(ours["parameters"], plain["parameters"])
        assert all(map(torch.equal, ours["behind"], plain["behind"]))
    assert len(devices) == num_workers


# -- other features with it -----------------------------------------------------------------------


def test_a_round_that_is_not_finite_is_dropped_and_what_was_outstanding_is_not(
    tmp_path: Path,
) -> None:
    """The second round of four ends in infinity."""

    class Exploding(Steady):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.num_steps = getattr(self, "num_steps", 0) + 1
            if self.num_steps == 7:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].fill_(torch.inf)

    Exploding.__module__, Exploding.__qualname__ = "torch.optim", "SGD"
    script = training(lambda parameters: Exploding(parameters, lr=1.0))
    (result,) = run(script, tmp_path, on_nonfinite="skip").results
    start = flat(PROBLEM.model())
    for step, values in enumerate(result["behind"]):
        if step not in (6,):
            moved = step + 1 if step < 7 else step - 3
            assert torch.allclose(values - start, torch.full_like(start, moved), atol=1e-4), step
    assert torch.allclose(result["parameters"] - start, torch.full_like(start, 12), atol=1e-4)


def test_where_a_push_is_left_for_later_the_reply_is_what_the_servers_have(tmp_path: Path) -> None:
    """They answer with nothing, since nothing has changed, and the memory aside must have it."""
    given: dict[str, Any] = {"push_codec": "skip:0.999", "codec_exact": ()}
    script = training(lambda parameters: Steady(parameters, lr=1e-4))
    (result,) = run(script, tmp_path, **given).results
    start = flat(PROBLEM.model())
    moved = [1e4 * float((values - start).median()) for values in result["behind"][:8]]
    assert moved == pytest.approx([1, 2, 3, 4, 5, 6, 7, 4], abs=1e-2)


def test_gradients_that_are_added_up_are_of_the_round_before(tmp_path: Path) -> None:
    """``outer = accumulate``: in one group a round uses the values without the newest update."""
    plain_sgd: Make = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    (result,) = run(training(plain_sgd), tmp_path, outer="accumulate").results
    model, newest = PROBLEM.model(), vector(PROBLEM.model())
    before = newest
    batches = list(PROBLEM.batches(size=SIZE, count=STEPS))
    for round_ in range(STEPS // 4):
        torch.nn.utils.vector_to_parameters(before.clone(), model.parameters())
        model.zero_grad()
        for x, y in batches[4 * round_ : 4 * round_ + 4]:
            (nn.functional.cross_entropy(model(x), y) / 4).backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
        before, newest = newest, newest - 0.1 * gradient
        if round_ < 3:
            assert torch.allclose(
                result["behind"][4 * round_ + 3], before.double(), rtol=1e-4, atol=1e-6
            )
    assert torch.allclose(result["parameters"], newest.double(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "beside",
    [
        {"push_codec": "int8", "pull_codec": "bf16"},
        {"push_codec": "topk:0.1"},
        {"codec": "none", "outer": "nesterov", "checkpoint_every": "2"},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", SEEDS)
def test_codecs_and_checkpoints_go_with_it(
    seed: int, beside: dict[str, Any], tmp_path: Path
) -> None:
    groups = ((0, 1), (2,))
    given: dict[str, Any] = {"groups": groups, "seed": seed, "mode": "ssp", "staleness": 2}
    coded = run(training(), tmp_path / "coded", **given, **beside)
    outer = beside.get("outer", "average")
    plain = run(training(), tmp_path / "plain", **given, outer=outer)
    start = flat(PROBLEM.model())
    wanted = plain.results[0]["parameters"] - start
    for result in coded.results:
        moved = result["parameters"] - start
        assert float(moved @ wanted / moved.norm() / wanted.norm()) > 0.8


@pytest.mark.parametrize("steps_by", ["speed", "loss"])
def test_rounds_of_other_lengths_go_with_it(steps_by: str, tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        model = PROBLEM.model()
        model, optimizer = job.prepare(model, sgd(model.parameters()))
        for _ in range(6):
            for x, y in job.loader(by_pass_cases.data(), batch_size=1):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                job.report(loss)
                stage.sleep(3e-3 if job.group else 1e-3)
                optimizer.step()
        return {"clock": job.clock}

    outcome = run(script, tmp_path, groups=((0, 1), (2,)), steps_by=steps_by, local_steps=4)
    assert len({each["clock"] for each in outcome.results}) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_round_of_an_epoch_awaits_the_replies_of_the_one_before(
    seed: int, tmp_path: Path
) -> None:
    outcome = run(
        by_pass_cases.training(),
        tmp_path,
        seed=seed,
        groups=((0, 1), (2,)),
        mode="ssp",
        local_steps="epoch",
    )
    assert outcome.summary["rounds_cut"] == 0
    assert all(each["clocks"] == [1, 2, 3] for each in outcome.results)


def test_a_run_goes_on_from_a_checkpoint_behind_an_outstanding_reply(tmp_path: Path) -> None:
    """A single group, which ends with the bits of an undisturbed run."""

    def script_of(has_checkpoint: bool) -> Script:
        def script(job: Job, _stage: Stage) -> Result:
            model = PROBLEM.model()
            model, optimizer = job.prepare(model, sgd(model.parameters()))
            job.state.setdefault("step", 0)
            for _ in job.epochs(2):
                for x, y in job.loader(by_pass_cases.data(), batch_size=2):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    job.state["step"] += 1
                    if has_checkpoint and job.state["step"] == 9:
                        job.checkpoint()
            job.barrier()
            return {"parameters": flat(model), "clock": job.clock}

        return script

    groups = ((0, 1),)
    whole = run(script_of(has_checkpoint=True), tmp_path / "whole", groups=groups)
    again = Path(shutil.copytree(tmp_path / "whole", tmp_path / "again"))
    given: dict[str, Any] = {"groups": groups, "resumes": True, "resume": True}
    resumed = run(script_of(has_checkpoint=False), again, **given)
    for ours, others in zip(resumed.results, whole.results, strict=True):
        assert torch.equal(ours["parameters"], others["parameters"])
        assert ours["clock"] == others["clock"]


# -- versions that are wrong -----------------------------------------------------------------


def loses_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply alone, as without ``pipeline``."""

    def before(self: LocalDifferences, _reduced: Any) -> None:
        del self

    monkeypatch.setattr(LocalDifferences, "_before_exchange", before)


def counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the round began stays where the one before did."""
    whole = LocalDifferences.after_replies

    def after(self: LocalDifferences) -> None:
        began = [each.clone() for each in self._anchor]
        has_progress = self._has_progress
        whole(self)
        if not has_progress:
            for anchor, before in zip(self._anchor, began, strict=True):
                anchor.copy_(before)

    monkeypatch.setattr(LocalDifferences, "after_replies", after)


def test_gradients_of_the_next_round_do_not_lie_where_the_push_is_under_way_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = LocalSteps.end_round

    def end_round(self: LocalSteps, call: str, *, is_cut: bool = True) -> Any:
        yield from whole(self, call, is_cut=is_cut)
        if self.flat.is_diverted:
            self.flat.rejoin_gradients(keeps=True)

    script = training()
    run(script, tmp_path / "right", credits=1)
    monkeypatch.setattr(LocalSteps, "end_round", end_round)
    with pytest.raises((JobFailedError, InvariantError), match="the bytes of an open send"):
        run(script, tmp_path / "wrong", credits=1, record=False)


@pytest.mark.parametrize("breaks", [loses_progress, counts_twice])
def test_wrong_versions_come_elsewhere(
    breaks: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    breaks(monkeypatch)
    (result,) = run(training(), tmp_path).results
    *_, last = one_group(OUTERS["average"], num_workers=1)
    assert not torch.allclose(result["parameters"], last, rtol=1e-2, atol=1e-3)


def test_over_mpi_rounds_are_proved_and_nothing_is_written_over(
    outcomes: dict[str, Outcome],
) -> None:
    outcome = outcomes["pipelined rounds"]
    outcome.checked()
    assert outcome.summary["recorded"]["pipeline"] == 1
    first, *others = outcome.results
    assert torch.equal(first["parameters"], others[0]["parameters"]), "of a group"
    assert all(torch.isfinite(each["parameters"]).all() for each in outcome.results)
