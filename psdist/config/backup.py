"""What backup groups go with: one function decides, and docs/backup.md has its table.

contradiction_of_backup(config)            # "" where the run can be

python -m psdist.config.backup             # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psdist.config.combinations import codecs_of

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig


class Other(NamedTuple):
    """A setting beside ``backup``."""

    given: dict[str, object]
    """As an example."""
    why_not: str
    """"" where both go together."""
    remedy: str = ""


OTHERS: Final = (
    Other({"mode": "ssp"}, "there every group's update is applied when it comes", "mode = sync"),
    Other({"mode": "async"}, "there every group's update is applied when it comes", "mode = sync"),
    Other({"mode": "auto"}, "a mode that changes was not tried with it yet", "mode = sync"),
    Other(
        {"schedule": "0: sync; 100: ssp:2"},
        "a mode that changes was not tried with it yet",
        "no schedule",
    ),
    Other(
        {"set_mode": "allowed"},
        "a mode that changes was not tried with it yet",
        "set_mode = refused",
    ),
    Other(
        {"push_codec": "int8"},
        "what a codec leaves out of an update that is dropped would be lost",
        "push_codec = none",
    ),
    Other({"pull_codec": "int8"}, ""),
    Other({"local_steps": 2}, "local steps were not tried with it yet", "local_steps = 1"),
    Other({"max_deaths": 1}, "deaths were not tried with it yet", "max_deaths = 0"),
    Other(
        {"replication": "buddy", "servers": 2},
        "second copies were not tried with it yet",
        "replication = none",
    ),
    Other(
        {"resume": True},
        "a run that goes on from a checkpoint was not tried with it yet",
        "resume = false",
    ),
    Other(
        {"overlap": "full"},
        "a round closes when gradients are sent in step()",
        "overlap = auto or off",
    ),
    Other(
        {"overlap": "strict"},
        "a round closes when gradients are sent in step()",
        "overlap = auto or off",
    ),
    Other({"group": "node"}, ""),
    Other({"checkpoint_every": "100"}, ""),
)


def contradiction_of_backup(config: RunConfig) -> str:
    """What does not go with backup groups, and what to do; "" where all does."""
    if not config.backup:
        return ""
    for each in OTHERS:
        if each.why_not and _is_given(config, each.given):
            told = ", ".join(f"{key} = {getattr(config, key)}" for key in list(each.given)[:1])
            return (
                f"backup = {config.backup} with {told}: {each.why_not}; set {each.remedy}, or "
                "backup = 0"
            )
    return ""


def _is_given(config: RunConfig, given: dict[str, object]) -> bool:
    (key, value), *_ = given.items()
    if key == "push_codec":
        codecs = codecs_of(
            codec=config.codec, push_codec=config.push_codec, pull_codec=config.pull_codec
        )
        return not codecs.push.is_none
    found = getattr(config, key)
    if isinstance(value, int) and not isinstance(value, bool):
        return bool(found >= value)
    return bool(found is not None if key == "schedule" else found == value)


def table() -> str:
    """Of the settings beside ``backup``, as Markdown."""
    lines = ["| with | |", "|---|---|"]
    for each in OTHERS:
        (key, value), *_ = each.given.items()
        told = str(value).lower() if isinstance(value, bool) else value
        lines.append(f"| `{key} = {told}` | {each.why_not or 'yes'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
