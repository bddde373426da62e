"""Settings beside one that does not go with all of them: who says why, and makes a table of it.

refusal(config, OTHERS, mine="backup = 1", off="backup = 0")    # a line, "" where all go with it
table(OTHERS)                                                   # Markdown
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from psdist.config.codec_rounds import codecs_that_may_come
from psdist.config.modes import mode_by, modes_that_may_come
from psdist.config.outer import has_rounds

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig


class Other(NamedTuple):
    """A setting beside the one in question."""

    given: dict[str, object]
    """As an example; the first of them decides."""
    why_not: str
    """"" where both go together."""
    remedy: str = ""


def refusal(config: RunConfig, others: Sequence[Other], *, mine: str, off: str) -> str:
    """Why the first of ``others`` that this run has does not go with the setting, ``mine``, and
    what to set; "" where none is refused. ``off`` does without the setting."""
    for other in others:
        if other.why_not and _is_given(config, other.given):
            return (
                f"{mine} with {_told(config, other)}: {other.why_not}; set "
                f"{_remedy(config, other)}, or {off}"
            )
    return ""


def _is_given(config: RunConfig, given: dict[str, object]) -> bool:
    (key, value), *_ = given.items()
    if key in ("push_codec", "pull_codec"):
        coming = codecs_that_may_come(config)
        coded = [each.push if key == "push_codec" else each.pull for each in coming]
        return not all(each.is_none for each in coded)
    if key == "local_steps":
        return has_rounds(config)
    if key in ("schedule", "checkpoint_every"):
        return getattr(config, key) is not None
    if (key, value) == ("mode", "sync"):
        return "sync" in modes_that_may_come(config)
    found = getattr(config, key)
    if value is not None and found is None:
        return False
    if key == "server_device":
        return bool(found != "cpu")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return bool(found >= value)
    return bool(found == value)


def _told(config: RunConfig, other: Other) -> str:
    """The setting as this run has it."""
    (key, value), *_ = other.given.items()
    if key in ("push_codec", "pull_codec") and getattr(config, key) is None:
        key = "codec" if config.codec is not None else "schedule"
    elif (key, value) == ("mode", "sync") and (by := mode_by(config)) in ("schedule", "script"):
        key = {"schedule": "schedule", "script": "set_mode"}[by]
    return f"{key} = {getattr(config, key)}"


def _remedy(config: RunConfig, other: Other) -> str:
    """What to set."""
    key = next(iter(other.given))
    if key in ("push_codec", "pull_codec") and _told(config, other).startswith("schedule"):
        return f"{other.remedy} in every part of the schedule"
    return other.remedy


def table(others: Sequence[Other]) -> str:
    """As Markdown."""
    lines = ["| with | |", "|---|---|"]
    for each in others:
        (key, value), *_ = each.given.items()
        said = str(value).lower() if isinstance(value, bool) else value
        lines.append(f"| `{key} = {said}` | {each.why_not or 'yes'} |")
    return "\n".join(lines) + "\n"
