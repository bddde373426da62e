"""Delay compensation: the formula of DC-ASGD, element by element."""

from __future__ import annotations

import torch

from psdist.servers.shard.given import Given


def test_the_gradient_is_moved_to_where_the_parameters_are_now() -> None:
    given = Given(0.5)
    then, now = torch.tensor([1.0, 2.0, -1.0]), torch.tensor([1.5, 1.0, -1.0])
    given.note(3, 7, then)
    gradient = torch.tensor([2.0, -3.0, 4.0])
    given.compensate(3, 7, gradient, now)
    # g + lambda g g (now - then)
    assert gradient.tolist() == [2.0 + 0.5 * 4 * 0.5, -3.0 + 0.5 * 9 * -1.0, 4.0]
    assert now.tolist() == [1.5, 1.0, -1.0]


def test_what_was_given_is_a_copy_of_each_reader_s_own() -> None:
    given, values = Given(1.0), torch.tensor([1.0, 1.0])
    given.note(0, 1, values)
    values.fill_(3.0)
    given.note(0, 2, values)
    late, fresh = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])
    given.compensate(0, 1, late, values)
    given.compensate(0, 2, fresh, values)
    assert late.tolist() == [3.0, 3.0]
    assert fresh.tolist() == [1.0, 1.0]
    given.note(0, 1, values)
    given.compensate(0, 1, fresh, values)
    assert fresh.tolist() == [1.0, 1.0]
    assert given.num_bytes == 2 * values.nbytes


def test_a_gradient_whose_square_is_no_number_stays_where_nothing_has_moved() -> None:
    given, values = Given(1.0), torch.tensor([1.0])
    given.note(0, 1, values)
    gradient = torch.tensor([1e30])
    given.compensate(0, 1, gradient, values)
    assert gradient.tolist() == torch.tensor([1e30]).tolist()
