"""The violations that a check has found: counted by rule, the first ones in words.

findings = Findings(max_listed_per_rule=20)
findings.add_each(Rule.BOUND, np.flatnonzero(is_wrong), lambda use: f"use {use} ...")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

from psdist.history.records import Ints


class Rule(Enum):
    """The rules of docs/history.md, in the order of the report."""

    MEMBERSHIP = "groups join, suspend, resume, leave in an order that makes sense"
    APPLIES = "every update is applied once, in order, by the server that owns the chunk"
    LOADS = "values are set chunk by chunk, of the whole model, where no update is under way"
    KEPT = "a checkpoint is one cut of all chunks, and who goes on from it begins with it"
    MODES = "the mode changes as it may, on all servers alike, ahead of the rounds concerned"
    MISSED = (
        "as few groups miss a round as backup says, of all chunks the same, not always the same"
    )
    HANDS = "every sample is dealt once, and each group makes the local steps fixed for it"
    CODECS = "every push was coded as run.json says of its round"
    STEPS = "optimizer steps are whole, in group order, of the right groups"
    SCALES = "the learning rate is scaled by the group's share of the active workers"
    WEIGHTS = "what was applied weighs what its workers say they brought"
    PUSHES = "every worker says once of each iteration what its pushes carried"
    BOUND = "every use contains the updates that the mode requires"
    OWN = "every use contains the reader's own updates"
    WHOLE_STEPS = "no use shows half an optimizer step"
    COVERAGE = "every iteration of every worker used every chunk"
    BACKWARDS = "versions never go back"
    SAME_VERSION = "the workers of a group used the same versions"
    KNOWN_VERSION = "uses name versions that the owner's log has"
    SAMPLING = "the replies and uses that checksum_every calls for carry a checksum, and no others"
    CHECKSUM = "the bytes used are the bytes that the server held"
    SUMMARY = "summary.json claims what the history shows"


class Findings:
    """Counts all violations, and lists at most ``max_listed_per_rule`` of each rule."""

    def __init__(self, *, max_listed_per_rule: int) -> None:
        self._max_listed = max_listed_per_rule
        self._lines: dict[Rule, list[str]] = {rule: [] for rule in Rule}
        self.counts: Counter[Rule] = Counter()

    def add(self, rule: Rule, line: str) -> None:
        if len(self._lines[rule]) < self._max_listed:
            self._lines[rule].append(line)
        self.counts[rule] += 1

    def add_each(self, rule: Rule, which: Ints, line: Callable[[int], str]) -> None:
        """Add a violation for each index in ``which``; ``line`` returns its text."""
        room = self._max_listed - len(self._lines[rule])
        self._lines[rule].extend(line(int(index)) for index in which[:room])
        self.counts[rule] += len(which)

    @property
    def total(self) -> int:
        return self.counts.total()

    def lines(self) -> tuple[str, ...]:
        return tuple(line for rule in Rule for line in self._lines[rule])
