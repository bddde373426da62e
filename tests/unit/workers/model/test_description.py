"""What a worker tells of the user's model and optimizer, and what stays with the user."""

from __future__ import annotations

import pytest
import torch

from psdist.errors import ModelError
from psdist.protocol.optimizers import unpack_hyperparameters
from psdist.workers.model.description import (
    ModelDescription,
    first_difference,
    packed_hyperparameters,
)


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def labelled(module: torch.nn.Sequential, label: object) -> torch.optim.SGD:
    groups = [
        {"params": module[0].parameters(), "name": label},
        {"params": module[1].parameters(), "lr": 0.5},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def test_a_label_in_a_parameter_group_is_neither_refused_nor_sent() -> None:
    module = model()
    for label in ("decoder", object()):
        first, second = unpack_hyperparameters(packed_hyperparameters(labelled(module, label)))
        assert "name" not in first
        assert (first["lr"], first["momentum"]) == (0.1, 0.9)
        assert second["lr"] == 0.5


def test_workers_agree_whatever_their_labels() -> None:
    module = model()
    one, other = labelled(module, "decoder"), labelled(module, "encoder")
    description = ModelDescription.of(module, one)
    assert description.lines(one) == description.lines(other)


def test_of_a_schedule_only_what_the_optimizer_uses_is_sent() -> None:
    optimizer = labelled(model(), "decoder")
    own = set(unpack_hyperparameters(packed_hyperparameters(optimizer))[0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    before = unpack_hyperparameters(packed_hyperparameters(optimizer))[0]
    optimizer.step()
    schedule.step()
    after = unpack_hyperparameters(packed_hyperparameters(optimizer))[0]
    assert {"max_lr", "min_lr", "base_momentum"} <= set(optimizer.param_groups[0])
    assert set(before) == set(after) == own
    assert before["lr"] != after["lr"]
    assert before["momentum"] != after["momentum"]


def test_pieces_follow_the_module_and_the_rest_comes_from_the_chief() -> None:
    module = model()
    module[1].bias.requires_grad_(False)
    description = ModelDescription.of(module, labelled(module, "decoder"))
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [piece.name for piece in description.pieces] == names
    assert [piece.optimizer_group for piece in description.pieces] == [0, 0, 1, 1]
    assert [piece.is_frozen for piece in description.pieces] == [False, False, False, True]
    assert description.frozen == ()
    assert [name for name, _ in description.untrained] == [
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    ]


class Mixed(torch.nn.Module):
    """Parameters that a server holds, and some that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = torch.nn.Parameter(torch.ones(2))
        self.frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.ones(0), requires_grad=False)
        self.whole = torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
        self.outside = torch.nn.Parameter(torch.ones(2))
        self.frozen_outside = torch.nn.Parameter(torch.ones(2), requires_grad=False)


def test_what_the_optimizer_holds_is_a_piece_frozen_or_not_if_servers_train_such_values() -> None:
    module = Mixed()
    held = [each for name, each in module.named_parameters() if "outside" not in name]
    description = ModelDescription.of(module, torch.optim.SGD(held, lr=0.1))
    assert [(piece.name, piece.is_frozen) for piece in description.pieces] == [
        ("trained", False),
        ("frozen", True),
    ]
    others = ["empty", "whole", "outside", "frozen_outside"]
    assert [name for name, _ in description.untrained] == others
    assert [name for name, _ in description.frozen] == ["whole", "frozen_outside"]


def test_workers_must_agree_on_what_is_frozen() -> None:
    module = Mixed()
    optimizer = torch.optim.SGD([module.trained, module.frozen], lr=0.1)
    before = ModelDescription.of(module, optimizer).lines(optimizer)
    module.frozen.requires_grad_(True)
    after = ModelDescription.of(module, optimizer).lines(optimizer)
    assert first_difference(before, after) == (
        "'parameter frozen: shape [2], dtype float32, stride [1], optimizer group 0, frozen' "
        "against 'parameter frozen: shape [2], dtype float32, stride [1], optimizer group 0'"
    )


def test_a_tied_parameter_is_one_piece_with_all_its_names_in_a_save() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[1].weight = module[0].weight
    description = ModelDescription.of(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert [piece.name for piece in description.pieces] == ["0.weight", "0.bias", "1.bias"]
    names = description.saved_names(module)
    assert names["0.weight"] == names["1.weight"] == 0


def test_an_optimizer_over_parameters_of_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"holds 4 parameters that are not in the model"):
        ModelDescription.of(torch.nn.Linear(1, 1), labelled(model(), "decoder"))


def test_the_first_difference_between_two_models_is_told() -> None:
    assert first_difference(["a", "b"], ["a", "c"]) == "'b' against 'c'"
    assert first_difference(["a"], ["a", "c"]) == "'c' is missing on one of them"
