"""What is drawn of a job: the phases of its start, then two lines that fit the terminal."""

from __future__ import annotations

import pytest

from psdist.commands.launch.display import View
from psdist.report import PHASES, Training
from tests.support.tape import Tape


def view_of(num_ranks: int = 3) -> View:
    return View(num_ranks=num_ranks, script="train.py", started_s=100.0)


def drawn(view: View, *, width: int = 80, now_s: float = 103.0) -> list[str]:
    tape = Tape()
    lines = view.lines(width=width, now_s=now_s)
    tape.write("\n".join(lines).encode())
    assert all(len(line) <= width for line in tape.lines()), tape.lines()
    assert len(lines) <= 2
    return tape.lines()


def test_the_phases_of_a_start_follow_the_rank_that_is_furthest_behind() -> None:
    view = view_of()
    assert drawn(view) == ["starting mpirun  0:03"]
    view.rank_reached(1, "connecting")
    assert drawn(view) == ["connecting 3 ranks (1 have started)  0:03"]
    for rank in (0, 2):
        view.rank_reached(rank, "connecting")
    assert drawn(view) == ["connecting 3 ranks  0:03"]
    for phase in ("placing", "importing"):
        for rank in range(3):
            view.rank_reached(rank, phase)
    assert drawn(view, now_s=175.0) == ["importing torch  1:15"]
    view.take_role(0, is_worker=False)
    view.rank_reached(0, "training")
    view.rank_reached(1, "starting")
    assert drawn(view) == ["importing torch (2 of 3 ranks are done)  0:03"]
    view.rank_reached(2, "starting")
    assert drawn(view) == ["starting train.py  0:03"]
    view.rank_reached(2, "preparing")
    assert drawn(view) == ["starting train.py (1 of 2 ranks are done)  0:03"]
    view.rank_reached(1, "preparing")
    assert drawn(view) == ["preparing the model  0:03"]
    for rank in (1, 2):
        view.rank_reached(rank, "training")
    assert drawn(view) == ["training  0:03"]


def test_a_rank_that_prepares_another_model_is_not_at_the_start_again() -> None:
    view = view_of(1)
    for phase in (*PHASES, "preparing"):
        view.rank_reached(0, phase)
    assert view.phase == "training"


def test_where_the_coordinator_is_on_another_host_nothing_is_drawn_of_the_training() -> None:
    view = view_of(2)
    view.rank_reached(1, "importing")
    view.coordinator_is_elsewhere()
    assert drawn(view) == ["importing torch  0:03"]
    view.rank_reached(1, "training")
    assert drawn(view) == []


def facts() -> list[Training]:
    return [
        Training(
            at_s=10.0 + second,
            mode="ssp (staleness 3)",
            behind=20 * second,
            ahead=20 * second + 2,
            samples=1280 * second,
            epoch=second + 1,
            epochs=15,
            batch=0,
            batches=20,
            staleness=2,
            slowest=1,
            others_wait=0.24,
            last={"loss": "0.1234", "accuracy": "0.9417", "lr": "0.05"},
        )
        for second in range(5)
    ]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            60,
            [
                "ssp   27 %  epoch 5 of 15  iteration 80 of 300  ETA 0:11",
                "1280 samples/s  loss 0.1234  staleness 2  accuracy 0.9417",
            ],
        ),
        (
            80,
            [
                "ssp ━━━━━━                    27 %  epoch 5 of 15  iteration 80 of 300  ETA 0:11",
                "1280 samples/s  loss 0.1234  staleness 2  slowest: group 1 (others wait 24 %)",
            ],
        ),
        (
            120,
            [
                "ssp ━━━━━━━━━━╸                                27 %  epoch 5 of 15  "
                "iteration 80 of 300  ETA 0:11",
                "1280 samples/s  loss 0.1234  staleness 2  slowest: group 1 (others wait 24 %)  "
                "accuracy 0.9417  lr 0.05",
            ],
        ),
    ],
)
def test_training_is_drawn_in_two_lines_that_fit(width: int, lines: list[str]) -> None:
    view = view_of()
    for fact in facts():
        view.training(fact)
    assert drawn(view, width=width) == lines


@pytest.mark.parametrize("width", range(20, 131))
def test_no_width_is_exceeded(width: int) -> None:
    view = view_of()
    drawn(view, width=width)
    for fact in facts():
        view.training(fact)
        drawn(view, width=width)


def test_a_job_without_a_length_has_no_bar() -> None:
    view = view_of()
    view.training(Training(at_s=1.0, mode="sync", behind=7, ahead=7, samples=0))
    assert drawn(view) == ["sync  iteration 7"]


def test_text_that_looks_like_markup_is_shown_as_it_is() -> None:
    view = view_of()
    last = {"note": "[bold]x[/bold] :smile:"}
    view.training(Training(at_s=1.0, mode="sync", behind=7, ahead=7, samples=0, last=last))
    assert drawn(view)[1] == "note [bold]x[/bold] :smile:"
