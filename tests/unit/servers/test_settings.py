"""What pushes are made under: versions in order, bounded, and nothing that the model lacks."""

from __future__ import annotations

import pytest

from psdist.errors import ProtocolError
from psdist.protocol.control import Settings
from psdist.protocol.ids import worker_id
from psdist.protocol.optimizers import pack_hyperparameters
from psdist.servers.protocol.settings import PushSettings, SettingsOfWorkers

ONE = pack_hyperparameters([{"lr": 0.1}, {"lr": 0.2}])
OTHER = pack_hyperparameters([{"lr": 0.3}, {"lr": 0.2}])


def made(pipeline: int = 0) -> SettingsOfWorkers:
    settings = SettingsOfWorkers(server=3, pipeline=pipeline)
    settings.describe_model(num_pieces=4, num_optimizer_groups=2)
    return settings


def told(version: int, *absent: int, hyper: bytes = ONE) -> Settings:
    return Settings(version=version, hyper=hyper, absent=list(absent))


def test_every_worker_has_versions_of_its_own() -> None:
    settings = made()
    settings.learn(worker_id(0), told(1, 3, 0))
    settings.learn(worker_id(1), told(1, hyper=OTHER))
    assert settings.of(worker_id(0), 1) == PushSettings(ONE, frozenset({0, 3}))
    assert settings.of(worker_id(1), 1) == PushSettings(OTHER, frozenset())


@pytest.mark.parametrize("pipeline", [0, 1, 2])
def test_as_many_versions_are_kept_as_pushes_may_be_under_way(pipeline: int) -> None:
    settings = made(pipeline)
    for version in range(1, 10):
        settings.learn(worker_id(0), told(version, version % 4))
        kept = [old for old in range(version + 2) if is_known(settings, old)]
        assert kept == list(range(max(1, version - 2 - 2 * pipeline), version + 1))


def is_known(settings: SettingsOfWorkers, version: int) -> bool:
    try:
        return settings.of(worker_id(0), version).absent == frozenset({version % 4})
    except ProtocolError:
        return False


def test_a_push_under_settings_that_were_never_sent_is_refused() -> None:
    settings = made()
    with pytest.raises(
        ProtocolError, match=r"server 3: worker 0 pushed under version 1 of its .* 0$"
    ):
        settings.of(worker_id(0), 1)
    settings.learn(worker_id(0), told(1))
    with pytest.raises(
        ProtocolError, match=r"worker 0 pushed under version 2 of its settings.* 1$"
    ):
        settings.of(worker_id(0), 2)
    with pytest.raises(ProtocolError, match="worker 1 pushed under version 1 of its settings"):
        settings.of(worker_id(1), 1)


@pytest.mark.parametrize("version", [-1, 0, 3])
def test_versions_come_one_after_the_other(version: int) -> None:
    settings = made()
    settings.learn(worker_id(0), told(1))
    with pytest.raises(ProtocolError, match=f"sent version {version} of its settings after .* 1$"):
        settings.learn(worker_id(0), told(version))
    settings.learn(worker_id(0), told(2))


def test_a_second_delivery_changes_nothing_and_another_message_of_that_version_is_refused() -> None:
    settings = made()
    settings.learn(worker_id(0), told(1, 2))
    settings.learn(worker_id(0), told(1, 2))
    for other in (told(1, 3), told(1, 2, hyper=OTHER)):
        with pytest.raises(ProtocolError, match="sent version 1 of its settings after version 1"):
            settings.learn(worker_id(0), other)
    settings.learn(worker_id(0), told(2))
    with pytest.raises(ProtocolError, match="sent version 1 of its settings after version 2"):
        settings.learn(worker_id(0), told(1, 2))
    assert settings.of(worker_id(0), 2) == PushSettings(ONE, frozenset())


@pytest.mark.parametrize(
    ("absent", "words"),
    [((0, 4), "pieces 0 to 4"), ((-1,), "pieces -1 to -1"), ((3, 9, 5), "pieces 3 to 9")],
)
def test_pieces_that_the_model_lacks_are_refused(absent: tuple[int, ...], words: str) -> None:
    settings = made()
    with pytest.raises(ProtocolError, match=f"worker 0 named {words} as absent; the model has 4"):
        settings.learn(worker_id(0), told(1, *absent))
    settings.learn(worker_id(0), told(1, 0, 1, 2, 3))


def test_hyperparameters_of_another_model_are_refused_and_so_are_damaged_ones() -> None:
    settings = made()
    one = pack_hyperparameters([{"lr": 0.1}])
    with pytest.raises(
        ProtocolError, match=r"hyperparameters of 1 optimizer groups; the model has 2"
    ):
        settings.learn(worker_id(0), told(1, hyper=one))
    with pytest.raises(ProtocolError, match=r"^server 3: worker 0 sent "):
        settings.learn(worker_id(0), told(1, hyper=b"\xc1"))
