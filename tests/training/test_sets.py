"""Several parameter sets in one job: two models in turn, one model with two optimizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from psdist.commands.check import check_run
from psdist.errors import HistoryError, ModelError, UsageError
from psdist.history.writers import read_histories
from psdist.job import Job
from tests.support.programs.training.cases import Case, Outcome, Result, Script, Stage
from tests.support.programs.training.problems import flat, relative_distance
from tests.support.programs.training.virtual_job import run_virtually

Groups = tuple[tuple[int, ...], ...]
TOGETHER: Groups = ((0, 1, 2),)
APART: Groups = ((0,), (1,), (2,))
MIXED: Groups = ((0, 1), (2,))
BATCH = 4
STEPS = 6
Prepare = Callable[..., Any]


def run(
    script: Script,
    tmp_path: Path,
    *,
    groups: Groups,
    servers: int = 2,
    **settings: object,
) -> Outcome:
    """Proved, too."""
    settings = {"mode": "sync", "record": True, "checksum_every": 1, **settings}
    case = Case(name="sets", script=script, groups=groups, servers=servers, settings=settings)
    outcome = run_virtually(case, tmp_path)
    outcome.checked()
    return outcome


def refused(error: type[Exception], told: str, script: Script, tmp_path: Path) -> None:
    case = Case(name="refused", script=script, groups=APART)
    with pytest.raises(error, match=told):
        run_virtually(case, tmp_path / "run")


def noise(step: int, workers: Iterable[int], width: int) -> Tensor:
    """As many samples of each worker as a batch has, in the order of the workers."""
    parts = []
    for worker in workers:
        generator = torch.Generator().manual_seed(1000 * worker + step)
        parts.append(torch.randn(BATCH, width, generator=generator))
    return torch.cat(parts)


def models() -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator, of more than one chunk each."""
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 35))
    discriminator = nn.Sequential(nn.Linear(35, 50), nn.Tanh(), nn.Linear(50, 1))
    return generator, discriminator


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.5, 0.9))


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_gan(prepare: Prepare, workers: Sequence[int]) -> Result:
    """Two steps of the discriminator for one of the generator."""
    generator, discriminator = models()
    generator, generates = prepare(generator, adam(generator.parameters()))
    discriminator, discriminates = prepare(discriminator, momentum(discriminator.parameters()))
    loss_of = nn.BCEWithLogitsLoss()
    ones = torch.ones(BATCH * len(workers), 1)
    for step in range(STEPS):
        fake = generator(noise(step, workers, 3))
        real = noise(step + 100, workers, 35)
        discriminates.zero_grad()
        loss = loss_of(discriminator(real), ones)
        loss += loss_of(discriminator(fake.detach()), ones * 0)
        loss.backward()
        discriminates.step()
        if step % 2:
            generates.zero_grad()
            loss_of(discriminator(fake), ones).backward()
            generates.step()
    return {"generator": flat(generator), "discriminator": flat(discriminator)}


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Linear(5, 60)
        self.actor = nn.Linear(60, 30)
        self.critic = nn.Linear(60, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.tanh(self.body(x))
        return self.actor(features), self.critic(features.detach())


def train_actor_critic(prepare: Prepare, workers: Sequence[int]) -> Result:
    """One model, an optimizer for each of its parts, stepped two to one."""
    model = ActorCritic()
    actors = [*model.body.parameters(), *model.actor.parameters()]
    optimizers = [adam(actors), momentum(model.critic.parameters())]
    model, (acts, criticises) = prepare(model, optimizers)
    for step in range(STEPS):
        action, value = model(noise(step, workers, 5))
        for optimizer in (acts, criticises):
            optimizer.zero_grad()
        (value.square().mean() + action.sin().mean()).backward()
        criticises.step()
        if step % 2:
            acts.step()
    return {"model": flat(model)}


Train = Callable[[Prepare, Sequence[int]], Result]


def in_a_job(train: Train) -> Script:
    def script(job: Job, _stage: Stage) -> Result:
        result = train(job.prepare, [job.worker])
        return {**result, "clock": job.clock, "clocks": job.clocks}

    return script


@pytest.mark.parametrize(("train", "clocks"), [(train_gan, [3, 6]), (train_actor_critic, [3, 6])])
@pytest.mark.parametrize("groups", [TOGETHER, APART])
def test_sets_that_are_stepped_two_to_one_equal_one_process_with_the_joint_batch(
    train: Train, clocks: list[int], groups: Groups, tmp_path: Path
) -> None:
    alone = train(lambda model, optimizer: (model, optimizer), [0, 1, 2])
    outcomes = [
        run(in_a_job(train), tmp_path / str(servers), groups=groups, servers=servers)
        for servers in (1, 3)
    ]
    for outcome in outcomes:
        for result in outcome.results:
            assert (result["clock"], result["clocks"]) == (clocks[0], clocks)
            for name, expected in alone.items():
                assert relative_distance(result[name], expected) < 1e-5
                assert torch.equal(result[name], outcomes[0].results[0][name])
        summary = outcome.summary
        assert [each["clocks"] for each in summary["sets"]] == [[n] * len(groups) for n in clocks]
        assert summary["updates_applied"] == sum(clocks) * len(groups)
        assert summary["bytes_pushed"] == sum(each["bytes_pushed"] for each in summary["sets"])


@pytest.mark.parametrize("mode", ["ssp", "async"])
def test_sets_of_groups_that_go_ahead_keep_their_rules(mode: str, tmp_path: Path) -> None:
    """Each set by itself: a group is late in one of them and in time in the other."""

    def script(job: Job, stage: Stage) -> Result:
        generator, discriminator = models()
        generator, generates = job.prepare(generator, momentum(generator.parameters()))
        discriminator, discriminates = job.prepare(
            discriminator, momentum(discriminator.parameters())
        )
        for step in range(10):
            stage.sleep(0.01 * (1 + job.group))
            out = discriminator(generator(noise(step, [job.worker], 3)))
            out.mean().backward()
            discriminates.step()
            if step % 5 == job.group:
                generates.step()
            if step == 6:
                job.barrier()
        return {}

    outcome = run(script, tmp_path, groups=MIXED, mode=mode, staleness=1)
    assert [each["clocks"] for each in outcome.summary["sets"]] == [[2, 2], [10, 10]]


def test_each_model_is_saved_whole_and_by_name(tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        result = train_gan(
            lambda *given: kept.append(job.prepare(*given)) or kept[-1], [job.worker]
        )
        for name, (model, _) in zip(("g", "d"), kept, strict=True):
            job.save(stage.path / f"{name}.safetensors", model)
        return result

    kept: list[Any] = []
    outcome = run(script, tmp_path, groups=((0,),))
    for name, saved in (("generator", "g"), ("discriminator", "d")):
        values = load_file(tmp_path / f"{saved}.safetensors")
        assert list(values) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        found = torch.cat([values[each].flatten() for each in dict(models()[0].named_parameters())])
        assert torch.equal(found, outcome.results[0][name])


def test_a_model_with_two_optimizers_is_saved_as_one(tmp_path: Path) -> None:
    def script(job: Job, stage: Stage) -> Result:
        result = train_actor_critic(job.prepare, [job.worker])
        job.save(stage.path / "both.safetensors")
        return result

    outcome = run(script, tmp_path, groups=MIXED)
    values = load_file(tmp_path / "both.safetensors")
    found = [values[name].flatten() for name, _ in ActorCritic().named_parameters()]
    assert torch.equal(torch.cat(found), outcome.results[2]["model"])


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(noise(0, range(2), 3)[:7])


def test_a_worker_whose_data_has_ended_takes_part_in_the_steps_of_every_set(
    tmp_path: Path,
) -> None:
    """Of 7 samples worker 0 gets 3, the others 2."""

    def train(prepare: Prepare, batches: Callable[[], Any]) -> Result:
        generator, discriminator = models()
        generator, generates = prepare(generator, momentum(generator.parameters()))
        discriminator, discriminates = prepare(discriminator, momentum(discriminator.parameters()))
        for x in batches():
            for optimizer in (generates, discriminates):
                optimizer.zero_grad()
                discriminator(generator(x)).square().mean().backward()
                optimizer.step()
        return {"generator": flat(generator), "discriminator": flat(discriminator)}

    def script(job: Job, _stage: Stage) -> Result:
        loader: DataLoader[Tensor] = DataLoader(Stream(), batch_size=1)

        def prepare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            nonlocal loader
            if job.clocks:
                model, optimizer, loader = job.prepare(model, optimizer, loader)
                return model, optimizer
            return job.prepare(model, optimizer)

        return train(prepare, lambda: loader)

    x = noise(0, range(2), 3)
    joint = [x[:3], x[3:6], x[6:7]]
    alone = train(lambda *given: given, lambda: joint)
    for result in run(script, tmp_path, groups=TOGETHER).results:
        for name, expected in alone.items():
            assert relative_distance(result[name], expected) < 1e-5


def test_the_gradients_of_one_optimizer_are_clipped(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        generator, discriminator = models()
        generator, generates = job.prepare(generator, momentum(generator.parameters()))
        discriminator, _ = job.prepare(discriminator, momentum(discriminator.parameters()))
        discriminator(generator(noise(1, [job.worker], 3))).mean().backward()
        gradients = [each.grad.flatten() for each in generator.parameters()]
        norm = job.clip_grad_norm_(0.1, generates)
        generates.step()
        return {"norm": norm, "own": torch.cat(gradients).double().norm()}

    (result,) = run(script, tmp_path, groups=((0,),)).results
    assert float(result["norm"]) == pytest.approx(float(result["own"]))


def test_small_sets_go_to_different_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        pairs = [
            job.prepare(model := nn.Linear(3, 1), momentum(model.parameters())) for _ in range(2)
        ]
        for steps, (model, optimizer) in zip((2, 3), pairs, strict=True):
            for _ in range(steps):
                model(noise(0, [job.worker], 3)).sum().backward()
                optimizer.step()
        return {}

    summary = run(script, tmp_path, groups=APART, servers=2).summary
    assert [each["empty_servers"] for each in summary["sets"]] == [[1], [0]]
    assert summary["empty_servers"] == []
    assert "hold" not in caplog.text
    assert "iterations     2, 2, 2; 3, 3, 3 (by parameter set, by group)" in capsys.readouterr().out


# -- wrong uses ------------------------------------------------------------------------------------


def two(job: Job) -> tuple[nn.Module, Any, nn.Module, Any]:
    generator, discriminator = models()
    generator, generates = job.prepare(generator, momentum(generator.parameters()))
    discriminator, discriminates = job.prepare(discriminator, momentum(discriminator.parameters()))
    return generator, generates, discriminator, discriminates


def test_what_several_sets_leave_open_must_be_said(tmp_path: Path) -> None:
    def saves(job: Job, _stage: Stage) -> Result:
        two(job)
        job.save("m.safetensors")
        return {}

    def saves_another(job: Job, _stage: Stage) -> Result:
        two(job)
        job.save("m.safetensors", nn.Linear(1, 1))
        return {}

    def clips(job: Job, _stage: Stage) -> Result:
        two(job)
        job.clip_grad_norm_(1.0)
        return {}

    refused(UsageError, r"2 models were prepared.*model=", saves, tmp_path / "a")
    refused(UsageError, "this model was not prepared", saves_another, tmp_path / "b")
    refused(UsageError, r"2 optimizers were prepared.*optimizer\)", clips, tmp_path / "c")


def test_workers_that_save_different_models_are_told(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        generator, _, discriminator, _ = two(job)
        job.save("m.safetensors", discriminator if job.worker == 1 else generator)
        return {}

    refused(UsageError, "saves another model than this worker", script, tmp_path)


def test_a_parameter_is_trained_by_one_optimizer(tmp_path: Path) -> None:
    def at_once(job: Job, _stage: Stage) -> Result:
        model = ActorCritic()
        job.prepare(model, [adam(model.parameters()), momentum(model.critic.parameters())])
        return {}

    def in_turn(job: Job, _stage: Stage) -> Result:
        model = ActorCritic()
        job.prepare(model, momentum(model.parameters()))
        job.prepare(model, momentum(model.critic.parameters()))
        return {}

    told = r"parameter critic\.weight is in two prepared optimizers"
    refused(ModelError, told, at_once, tmp_path / "a")
    refused(ModelError, told, in_turn, tmp_path / "b")


def test_no_optimizer_and_one_that_was_prepared_are_refused(tmp_path: Path) -> None:
    def none(job: Job, _stage: Stage) -> Result:
        job.prepare(ActorCritic(), [])
        return {}

    def prepared(job: Job, _stage: Stage) -> Result:
        model, served = job.prepare(model := ActorCritic(), momentum(model.parameters()))
        job.prepare(model, served)
        return {}

    refused(UsageError, "no optimizer was given; pass it after the model", none, tmp_path / "a")
    refused(UsageError, "that it has returned itself", prepared, tmp_path / "b")


def test_workers_of_a_group_that_step_different_optimizers_are_told(tmp_path: Path) -> None:
    def script(job: Job, _stage: Stage) -> Result:
        generator, generates, discriminator, discriminates = two(job)
        discriminator(generator(noise(0, [job.worker], 3))).mean().backward()
        (discriminates if job.worker == 1 else generates).step()
        return {}

    case = Case(name="refused", script=script, groups=TOGETHER)
    with pytest.raises(UsageError, match=r"step different optimizers.*parameter sets 0 and 1"):
        run_virtually(case, tmp_path)


# -- histories -------------------------------------------------------------------------------------


def test_every_set_has_a_history_that_is_judged(tmp_path: Path) -> None:
    honest = run(in_a_job(train_gan), tmp_path / "run", groups=MIXED).path

    def forged(name: str, forge: Callable[[Path], None]) -> Path:
        path = tmp_path / name
        shutil.copytree(honest, path)
        forge(path)
        return path

    def verdict(path: Path) -> tuple[str, ...]:
        report = check_run(path, read_histories(path))
        assert not report.proved
        return report.violations

    missing = forged("missing", lambda path: shutil.rmtree(path / "history" / "set-1"))
    assert "summary.json says 2 parameter sets, there are histories of 1" in verdict(missing)[0]

    def swap(path: Path) -> None:
        (path / "history" / "set-1").rename(path / "history" / "set-2")

    with pytest.raises(HistoryError, match=r"contains set-2; parameter sets are numbered without"):
        read_histories(forged("gap", swap))

    def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
        body = json.loads(file.read_text())
        change(body)
        file.write_text(json.dumps(body))

    def of_set_0(path: Path) -> None:
        rewrite(path / "history/set-1/run.json", lambda body: body.update(set_index=0))

    with pytest.raises(HistoryError, match="it is of parameter set 0"):
        read_histories(forged("renamed", of_set_0))

    def of_another_job(path: Path) -> None:
        rewrite(path / "history/set-1/run.json", lambda body: body.update(psdist="9.9"))

    assert any(
        "not of one job" in line or "another job" in line
        for line in verdict(forged("other", of_another_job))
    )

    def clock_of_the_second(path: Path) -> None:
        rewrite(path / "summary.json", lambda body: body["sets"][1].update(clocks=[6, 5]))

    assert any(line.startswith("set 1: ") for line in verdict(forged("clock", clock_of_the_second)))

    for key in ("chunks", "updates_applied", "clocks", "staleness_seen"):

        def together(path: Path, key: str = key) -> None:
            values = {"clocks": [3, 4], "staleness_seen": {"0": 1}}
            rewrite(path / "summary.json", lambda body: body.update({key: values.get(key, 7)}))

        assert any(
            line.startswith(f"summary.json says {key}") and "sets together" in line
            for line in verdict(forged(key, together))
        )

    def server_together(path: Path) -> None:
        rewrite(path / "summary.json", lambda body: body["per_server"][1].update(pushes=0))

    assert "pushes of servers" in verdict(forged("server", server_together))[0]
