"""Whether every sample was dealt once, and each group made its fixed local steps.

Owns rule 11 of docs/reference/history.md: replays :mod:`psdist.controller.steps` on the recorded
observations, and compares the hands of workers with it. Pure.

    check_hands(run, read_worker_lines(folder, HandLine, ...), steps, findings)
    check_dealt_on({1: (run, hands), 2: (run, hands)}, findings)        # attempts, by number
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from psdist.controller.kept import KeptPaces, TuningState
from psdist.controller.steps import StepControl, Term, window_of
from psdist.history.lines import HandLine, StepLine, WorkerLines
from psdist.history.rules.choices.replayed import check_fixed
from psdist.history.rules.choices.resumed import goes_on
from psdist.history.rules.choices.resumed_modes import judging_mode
from psdist.history.rules.findings import Findings, Rule
from psdist.history.run_record import RunRecord

_MOST_TERMS: Final = 1 << 20
"""Most terms, of four rounds each, that an attempt may resume."""
_Pass = tuple[int, int]
"""Loader, and number of the pass over it."""


_Hands = Mapping[int, Mapping[int, HandLine]]
"""The lines of a pass, by hand and worker."""


def check_hands(
    run: RunRecord,
    workers: Sequence[WorkerLines[HandLine]],
    lines: Sequence[StepLine],
    findings: Findings,
) -> None:
    """``workers``: by worker; ``lines``: the coordinator's, in order."""
    fixed = _check_by_speed(run, lines, findings)
    for worker, told in enumerate(workers):
        _check_worker(run, worker, told.lines, fixed, findings)
    for key, hands in sorted(_by_hand(workers).items()):
        place = _start(hands) if run.restored else 0
        _check_pass(run, key, hands, findings, place=place, may_be_apart=bool(run.restored))


def _by_hand(
    workers: Sequence[WorkerLines[HandLine]], *, first: int = -1, end: int = 2**63
) -> Mapping[_Pass, _Hands]:
    """Return the hands of rounds ``first`` to ``end`` - 1, by pass; -1 is outside of training."""
    found: defaultdict[_Pass, defaultdict[int, dict[int, HandLine]]]
    found = defaultdict(lambda: defaultdict(dict))
    for worker, told in enumerate(workers):
        for line in told.lines:
            if first <= line.round < end:
                found[line.loader, line.number][line.hand][worker] = line
    return found


def _check_by_speed(
    run: RunRecord, lines: Sequence[StepLine], findings: Findings
) -> dict[Term, list[int]]:
    control = StepControl(
        sizes=[len(workers) for workers in run.groups], local_steps=run.local_steps_by_speed
    )

    resumed = lines[0].resumed if lines else None
    unsaid = []
    fixed: dict[Term, list[int]] = {}
    if resumed is not None and goes_on(run, resumed) and resumed.fidelity.paces is not None:
        unsaid.append(resumed.fidelity.paces)

    def take(line: StepLine) -> str:
        if line.resumed is not None:
            if not unsaid:
                return "names speeds that the run continued with, but it did not continue"
            paces = unsaid.pop()
            try:
                control.go_on(paces)
            except ValueError as error:
                return f"the run continued with speeds {error}"
            if sum(each.num_fixed for each in paces.passes) > _MOST_TERMS:
                return f"the run continued with more than {_MOST_TERMS} terms: none can be proved"
            if paces.sizes == control.sizes:
                fixed.update(_terms_of(paces))
            return ""
        if line.kept is not None:
            told = line.kept.fidelity.paces
            passes = () if told is None else told.passes
            is_so = bool(line.kept.checkpoint) and all(
                each.is_of(len(run.groups)) for each in passes
            )
            now = replace(control.kept(), passes=passes)
            if not is_so or line.kept.fidelity != TuningState(paces=now):
                return "other speeds than were observed"
            are_fixed = all(fixed.get(term) == its for term, its in _terms_of(now))
            return "" if are_fixed else "other steps of passes than were fixed"
        seen = line.observed
        if seen is None:
            return "is no observation"
        if seen.group >= len(run.groups):
            return "of no group of this run"
        control.observe(seen.group, seen.step_us)
        return ""

    return check_fixed(lines, take, control.choose, findings, fixed)


def _terms_of(paces: KeptPaces) -> Iterator[tuple[Term, list[int]]]:
    """Yield the fixed steps of the passes in a checkpoint."""
    for each in paces.passes:
        stops = [start for start, _ in each.starts[1:]] + [each.num_fixed]
        for (start, steps), stop in zip(each.starts, stops, strict=True):
            for block in range(start, stop):
                yield Term(each.loader, each.number, block), [*steps]


def _check_worker(
    run: RunRecord,
    worker: int,
    lines: Sequence[HandLine],
    fixed: Mapping[Term, Sequence[int]],
    findings: Findings,
) -> None:
    """Require one round for each hand, with the batches fixed for the group, except in the last
    hand of a pass."""
    broken = findings[Rule.HANDS]
    group = int(run.group_of_worker()[worker])
    last_round = -1
    coming: dict[_Pass, int] = {}
    for line in lines:
        where = f"worker {worker}: hand {line.hand} of pass {line.number} over loader {line.loader}"
        steps = fixed.get(Term(line.loader, line.number, window_of(line.hand)))
        if steps is None or len(steps) <= group:
            broken.add(f"{where} was never fixed")
        elif line.batches != steps[group] and not (line.end >= 0 and line.batches < steps[group]):
            broken.add(f"{where} is of {line.batches} batches, {steps[group]} were fixed")
        if 0 <= line.round <= last_round:
            broken.add(f"{where} ended in round {line.round}, as the hand before it")
        last_round = max(last_round, line.round)
        # check_dealt_on compares a pass that an earlier attempt began.
        due = coming.get((line.loader, line.number), line.hand if run.restored else 0)
        if line.hand != due:
            broken.add(f"{where} follows {due - 1}")
        coming[line.loader, line.number] = line.hand + 1
        if line.left > line.may_leave:
            broken.add(f"{where} leaves out {line.left} samples")


def _check_pass(
    run: RunRecord,
    key: _Pass,
    hands: _Hands,
    findings: Findings,
    *,
    place: int,
    may_be_apart: bool = False,
    where: str = "",
) -> None:
    """Require that the workers' parts of a hand are adjacent, and hands follow each other from
    ``place`` on. In a hand that some workers lack, no sample is dealt twice; ``may_be_apart``:
    later hands may follow it."""
    broken = findings[Rule.HANDS]
    which = f"{where}pass {key[1]} over loader {key[0]}"
    is_known = True
    for hand, lines in sorted(hands.items()):
        is_whole = len(lines) == run.num_workers
        for line in sorted(lines.values(), key=lambda each: each.start):
            is_gap = is_whole and is_known and line.start != place
            is_known = is_known or is_whole
            if line.start < place or is_gap or line.stop < line.start:
                broken.add(
                    f"{which}: in hand {hand} the samples {line.start} to {line.stop} were dealt, "
                    f"those before end at {place}"
                )
            place = max(place, line.stop)
        is_known = is_whole or not may_be_apart
        ends = {line.end for line in lines.values()}
        end = min(ends)
        if len(ends) > 1 or (end >= 0 and is_whole and end != place):
            broken.add(f"{which}: hand {hand} ends at {place}, workers say {sorted(ends)}")
        if end >= 0 and hand != max(hands):
            broken.add(f"{which}: hand {hand} is the last one, and others follow")


def _start(hands: _Hands) -> int:
    """Return the first position of these hands."""
    return min(line.start for line in hands[min(hands)].values())


# -- from attempt to attempt -------------------------------------------------------------------


class Attempt(NamedTuple):
    run: RunRecord
    """The promises of the first parameter set."""
    workers: Sequence[WorkerLines[HandLine]]
    """The hands of each worker."""


class _Dealt(NamedTuple):
    """The state of a pass at a checkpoint."""

    hand: int
    """The next hand."""
    place: int
    """Its position in the pass's order."""
    is_over: bool


def check_dealt_on(attempts: Mapping[int, Attempt], findings: Findings) -> None:
    """Require that each attempt deals the rest of the passes in its checkpoint, and all of every
    other pass."""
    broken = findings[Rule.HANDS]
    for number, (run, workers) in sorted(attempts.items()):
        maker = attempts.get(run.restored_attempt)
        if not run.restored or maker is None or not maker.run.local_steps_by_speed:
            continue
        if judging_mode(maker.run) != "sync":
            _check_dealt_apart(attempts, number, findings)
            continue
        cut = _cut(run)
        before = _dealt_until(attempts, maker, cut)
        mine = _by_hand(workers, first=0)
        for key, hands in sorted(mine.items()):
            if key not in before and not _is_known(attempts, maker):
                continue
            due = before.get(key, _Dealt(0, 0, is_over=False))
            where = f"attempt {number}: pass {key[1]} over loader {key[0]}"
            hand, start = min(hands), _start(hands)
            is_whole = len(hands[hand]) == run.num_workers
            if due.is_over:
                broken.add(f"{where} was over at {run.restored}, and is dealt again")
            elif hand != due.hand or start < due.place or (is_whole and start != due.place):
                broken.add(
                    f"{where} continues with hand {hand} at sample {start}; by {run.restored} "
                    f"hands up to {due.hand} were dealt, to {due.place}"
                )
        if run.groups != maker.run.groups or not mine:
            continue  # the rest may be too small for other workers
        for key in sorted(_by_hand(maker.workers, first=cut).keys() & before.keys() - mine.keys()):
            broken.add(
                f"attempt {number}: pass {key[1]} over loader {key[0]}, which was under way at "
                f"{run.restored}, is not dealt to its end"
            )


def _check_dealt_apart(attempts: Mapping[int, Attempt], number: int, findings: Findings) -> None:
    """Require, of groups in different hands, that each worker continues with its own next hand, and
    that all attempts together deal each pass. With other groups or in another mode no pass
    continues."""
    broken = findings[Rule.HANDS]
    run, workers = attempts[number]
    maker = attempts[run.restored_attempt]
    if run.groups != maker.run.groups or judging_mode(run) != judging_mode(maker.run):
        return
    mine = _by_hand(workers, first=0)
    before = _lines_until(attempts, maker, run)
    is_known = _is_known(attempts, maker)
    cuts = run.first[run.group_of_worker()].tolist()
    under_way = {
        (worker, (line.loader, line.number))
        for worker, told in enumerate(maker.workers)
        for line in told.lines
        if line.round >= cuts[worker]
    }
    for key in sorted({*mine, *before} if mine else ()):
        where = f"attempt {number}: pass {key[1]} over loader {key[0]}"
        hands, earlier = mine.get(key, {}), before.get(key, {})
        if key not in before and not is_known:
            continue
        for worker in range(run.num_workers):
            its = [hand for hand, lines in hands.items() if worker in lines]
            due = max((hand for hand in earlier if worker in earlier[hand]), default=-1) + 1
            is_over = due > 0 and earlier[due - 1][worker].end >= 0
            if its and (is_over or min(its) != due):
                broken.add(
                    f"{where} continues with hand {min(its)} on worker {worker}; by {run.restored} "
                    f"hands up to {due} were dealt to it{', which was the last' * is_over}"
                )
            is_left = due > 0 and not is_over and not its and (worker, key) in under_way
            if is_left and any(line.round >= 0 for line in workers[worker].lines):
                broken.add(
                    f"{where}, which was under way at {run.restored}, is not dealt to its end on "
                    f"worker {worker}"
                )
        both = {
            hand: {**earlier.get(hand, {}), **hands.get(hand, {})} for hand in {*hands, *earlier}
        }
        if hands:
            place = 0 if is_known else _start(both)
            _check_pass(run, key, both, findings, place=place, where=f"attempts up to {number}: ")


def _lines_until(
    attempts: Mapping[int, Attempt], attempt: Attempt, run: RunRecord
) -> dict[_Pass, dict[int, dict[int, HandLine]]]:
    """Return the lines of the rounds before ``run``, of this attempt and those it resumed from."""
    found: dict[_Pass, dict[int, dict[int, HandLine]]] = {}
    maker = attempts.get(attempt.run.restored_attempt) if attempt.run.restored else None
    if maker is not None:
        found = _lines_until(attempts, maker, attempt.run)
    cuts = run.first[run.group_of_worker()].tolist()
    for key, hands in _by_hand(attempt.workers, first=0).items():
        for hand, lines in hands.items():
            for worker, line in lines.items():
                if line.round < cuts[worker]:
                    found.setdefault(key, {}).setdefault(hand, {})[worker] = line
    return found


def _cut(run: RunRecord) -> int:
    """Return the first round of this attempt, which all groups share in sync."""
    return int(run.first[: run.first_substitute].min())


def _is_known(attempts: Mapping[int, Attempt], attempt: Attempt) -> bool:
    """Return True if all attempts that this one resumed from were recorded."""
    while attempt.run.restored:
        maker = attempts.get(attempt.run.restored_attempt)
        if maker is None or not maker.run.local_steps_by_speed:
            return False
        attempt = maker
    return True


def _dealt_until(
    attempts: Mapping[int, Attempt], attempt: Attempt, cut: int
) -> dict[_Pass, _Dealt]:
    """Return the passes at round ``cut``, by this attempt and those it resumed from."""
    run, workers = attempt
    maker = attempts.get(run.restored_attempt) if run.restored else None
    found = _dealt_until(attempts, maker, _cut(run)) if maker is not None else {}
    for key, hands in _by_hand(workers, first=0, end=cut).items():
        last = hands[max(hands)].values()
        found[key] = _Dealt(
            hand=max(hands) + 1,
            place=max(line.stop for line in last),
            is_over=any(line.end >= 0 for line in last),
        )
    return found
