"""Pairs of features as settings of one run: which there are, and runs that have them all.

both({"backup": 1}, {"local_steps": 2})       # {"backup": 1, "local_steps": 2}
runs = covering(examples)                     # few runs, in which each allowed pair occurs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from psdist.config.compatibility import refusal
from psdist.config.settings import RunConfig, contradiction
from psdist.features import FEATURES

MOST_IN_A_RUN = 6


def both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return settings that turn on the features of both examples, each by its first setting; None
    if these are the same setting with two values."""
    return together([one, other])


def together(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return settings that turn on the features of all examples; see :func:`both`."""
    decisive: dict[str, Any] = {}
    for key, value in (next(iter(each.items())) for each in examples if each):
        if decisive.setdefault(key, value) != value:
            return None
    rest = {key: value for each in examples for key, value in each.items()}
    return {**rest, **decisive}


def is_allowed(examples: Sequence[Mapping[str, Any]]) -> bool:
    """True if the examples give no setting two values, and psdist takes a run with them."""
    given = together(examples)
    if given is None or any(given[key] != each[key] for each in examples for key in each):
        return False
    try:
        config = RunConfig(**given)
    except ValidationError:  # one setting with two values, by an old name and the new one
        return False
    return not contradiction(config) and not refusal(config, script=optimizer_on_servers(given))


def uses_adam(given: Mapping[str, Any]) -> bool:
    """True if the script of a run with these settings trains with AdamW, and not with SGD."""
    return "freeze_step" in given


def optimizer_on_servers(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the properties of the servers' optimizer that the table of features names."""
    averages = given.get("local_steps", 1) != 1 and given.get("outer") != "accumulate"
    if uses_adam(given) and not averages:
        return {"optimizer other than SGD": "AdamW"}
    return {"optimizer without a second moment": "SGD"}


def covering(
    examples: Sequence[Mapping[str, Any]], first: Sequence[int] = ()
) -> list[tuple[int, ...]]:
    """Return runs, as indices of ``examples``, so that each allowed pair is in one of them.

    ``first``: only pairs with one of these; (): all pairs.
    """
    pairs = {
        pair
        for pair in combinations(range(len(examples)), 2)
        if (not first or set(pair) & set(first)) and is_allowed([examples[each] for each in pair])
    }
    runs = []
    while pairs:
        run = list(min(pairs))
        while len(run) < MOST_IN_A_RUN and (more := list(_more(run, examples, pairs))):
            run.append(max(more)[1])
        pairs -= set(combinations(sorted(run), 2))
        runs.append(tuple(sorted(run)))
    return runs


def _more(
    run: Sequence[int], examples: Sequence[Mapping[str, Any]], pairs: set[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield how many new pairs an example adds to the run, and which one."""
    for each in range(len(examples)):
        num_new = sum((min(each, one), max(each, one)) in pairs for one in run)
        if num_new and each not in run and is_allowed([examples[i] for i in (*run, each)]):
            yield num_new, each


def features_played(without: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the examples of all features in the table, except those with settings ``without``."""
    found: list[Mapping[str, Any]] = []
    for example in (each for feature in FEATURES for each in feature.settings):
        if not set(example) & set(without) and example not in found:
            found.append(example)
    return found
