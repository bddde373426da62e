"""The violations that a check has found: counted by rule, the first ones in words.

findings = Findings(max_listed_per_rule=20)
findings[Rule.BOUND].add_where(is_wrong, lambda use: f"use {use} ...")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum

import numpy as np

from psdist.history import Ints


class Rule(Enum):
    """The rules of docs/reference/history.md, in the order of the report."""

    MEMBERSHIP = "groups join, suspend, resume, leave in an order that makes sense"
    APPLIES = "every update is applied once, in order, by the server that owns the chunk"
    LOADS = "values are set chunk by chunk, of the whole model, where no update is under way"
    KEPT = "a checkpoint is one cut of all chunks, and a resumed run begins with it"
    MODES = "the mode changes as it may, on all servers alike, ahead of the rounds concerned"
    MISSED = (
        "as few groups miss a round as backup says, of all chunks the same, not always the same"
    )
    HANDS = "every sample is dealt once, and each group makes the local steps fixed for it"
    CODECS = "every push was coded as run.json says of its round"
    STEPS = "optimizer steps are whole, in group order, of the right groups"
    SCALES = "the learning rate is scaled by the group's share of the active workers"
    WEIGHTS = "an applied update has the weight that its workers report"
    PUSHES = "every worker reports once per iteration what its pushes carried"
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


class Violations:
    """The violations of one rule: all are counted, and the first ones are listed in words."""

    def __init__(self, max_listed: int) -> None:
        self._max_listed = max_listed
        self.lines: list[str] = []
        self.count = 0

    def add(self, line: str) -> None:
        if len(self.lines) < self._max_listed:
            self.lines.append(line)
        self.count += 1

    def add_each(self, which: Ints, line: Callable[[int], str]) -> None:
        """Add a violation for each index in ``which``; ``line`` returns its text."""
        room = self._max_listed - len(self.lines)
        self.lines.extend(line(int(index)) for index in which[:room])
        self.count += len(which)

    def add_where(self, is_wrong: Ints, line: Callable[[int], str]) -> None:
        """Add a violation for each index at which ``is_wrong`` is True."""
        self.add_each(np.flatnonzero(is_wrong), line)


class Findings:
    """The violations of all rules, with at most ``max_listed_per_rule`` lines for each."""

    def __init__(self, *, max_listed_per_rule: int) -> None:
        self._by_rule = {rule: Violations(max_listed_per_rule) for rule in Rule}

    def __getitem__(self, rule: Rule) -> Violations:
        return self._by_rule[rule]

    @property
    def counts(self) -> Counter[Rule]:
        """Number of violations of each broken rule."""
        return +Counter({rule: each.count for rule, each in self._by_rule.items()})

    @property
    def total(self) -> int:
        return self.counts.total()

    def lines(self) -> tuple[str, ...]:
        return tuple(line for each in self._by_rule.values() for line in each.lines)
