"""Whether a worker's iterations say where in its data it is."""

from __future__ import annotations

from psdist.protocol.returns import DataStanding
from psdist.workers.data.regular import RegularRounds
from psdist.workers.data.seen import Pass


def pass_of(number: int = 1, *, seen: int = 0, can_be_cut: bool = True) -> Pass:
    return Pass(epoch=0, number=number, seen=seen, num_batches=9, can_be_cut=can_be_cut)


def train(regular: RegularRounds, a_pass: Pass, *rounds: int) -> None:
    for num_batches in rounds:
        for _ in range(num_batches):
            regular.hand_out(a_pass)
            a_pass.seen += 1
        regular.end_iteration(num_batches)


def test_where_a_worker_is_in_a_pass_and_between_two() -> None:
    regular, a_pass = RegularRounds(), pass_of()
    assert regular.standing(None, clock=0, counts=[0]) == DataStanding(
        0, 0, None, False, 0, 0, (0,)
    )
    train(regular, a_pass, 2, 2)
    inside = DataStanding(2, 2, 1, True, 4, 9, (3, 1))
    assert regular.standing(a_pass, clock=2, counts=[3, 1]) == inside
    between = DataStanding(2, 2, 1, False, 0, 9, (3, 1))
    assert regular.standing(None, clock=2, counts=[3, 1]) == between


def test_a_pass_that_goes_on_from_a_checkpoint_is_known_before_its_first_batch() -> None:
    found = RegularRounds().standing(pass_of(2, seen=5), clock=5, counts=[0, 0, 1])
    assert found == DataStanding(5, 0, 2, True, 5, 9, (0, 0, 1))


def test_iterations_of_different_numbers_of_batches_say_nothing_until_the_next_pass() -> None:
    regular = RegularRounds()
    train(regular, pass_of(), 2, 1)
    why = "iterations take different numbers of batches"
    assert regular.standing(None, clock=2, counts=[1]) == why
    train(regular, pass_of(), 3)  # the first of a pass is compared with none
    train(regular, pass_of(), 3, 3)
    assert isinstance(regular.standing(None, clock=3, counts=[0, 2]), DataStanding)


def test_batches_that_psdist_does_not_deal_say_nothing() -> None:
    regular = RegularRounds()
    train(regular, pass_of(), 1)
    other = pass_of(can_be_cut=False)
    inside = regular.standing(other, clock=1, counts=[0, 1])
    assert inside == "the script is in a pass that is not dealt by psdist"
    train(regular, other, 1)
    train(regular, pass_of(), 1)
    found = regular.standing(None, clock=3, counts=[0, 1])
    assert isinstance(found, str)
    assert "batches that are not dealt by psdist" in found
    regular = RegularRounds()
    regular.end_iteration(0)
    found = regular.standing(None, clock=1, counts=[])
    assert found == "the script trains with batches of its own"


def test_several_datasets_say_nothing() -> None:
    why = "the script trains with several datasets"
    regular = RegularRounds()
    train(regular, pass_of(0), 1)
    assert regular.standing(pass_of(1), clock=1, counts=[1, 1]) == why
    train(regular, pass_of(1), 1)
    assert regular.standing(None, clock=2, counts=[1, 1]) == why


def test_loaders_that_are_read_together_say_nothing_and_one_that_was_left_early_does() -> None:
    together, one, other = RegularRounds(), pass_of(), pass_of()
    for a_pass in (one, other, one):
        together.hand_out(a_pass)
        a_pass.seen += 1
    found = together.standing(other, clock=1, counts=[0, 2])
    assert found == "the script trains with several loaders at once"
    regular = RegularRounds()
    train(regular, pass_of(), 1)  # break
    train(regular, pass_of(), 1)
    assert isinstance(regular.standing(None, clock=2, counts=[0, 2]), DataStanding)
