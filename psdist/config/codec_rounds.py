"""The codecs of each round: those of the settings, what a schedule says, or what psdist chooses.

coded_by_round(config)       # (CodecsFrom(0, push, pull), ...): one entry where nothing changes
ladder_of(config)            # of codec = auto: all that may come, the least lossy first
codecs_that_may_come(config)
has_codecs(config)
contradiction_of_codecs(config)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psdist.config.codec_specs import CodecSpec
from psdist.config.combinations import Codecs, codecs_of, parse_both, refusal, text_of_both
from psdist.config.modes import is_mixed, mode_by, modes_that_may_come, parts_of

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

AUTO: Final = "auto"
"""The codec with which psdist chooses."""
LADDER: Final = tuple(map(parse_both, ("none", "fp16", "int8", "int4", "int4/sign")))
"""Among these, the least lossy first."""
_LEAST_PULL: Final = LADDER[1].pull
"""Of pulls that are no differences, the one of the fewest bytes."""


class CodecsFrom(NamedTuple):
    """From this round on the codecs are these."""

    round: int
    push: CodecSpec
    pull: CodecSpec

    def __str__(self) -> str:
        """As a schedule writes it."""
        return text_of_both(Codecs(self.push, self.pull))


def is_auto(config: RunConfig) -> bool:
    """Whether psdist chooses the codecs within the run."""
    return config.codec == AUTO


def is_controlled(config: RunConfig) -> bool:
    """Whether psdist changes anything within the run by what it observes."""
    return is_auto(config) or mode_by(config) == "auto"


def ladder_of(config: RunConfig) -> tuple[Codecs, ...]:
    """Of ``codec = auto``: all that may come, the least lossy first, the first one from round 0 on;
    a direction whose codec is given keeps it. Where groups hold different versions, and servers
    keep none of them (ssp and async without ``pull_copies``), a pull is in 16 bits at least."""
    given = codecs_of(codec=None, push_codec=config.push_codec, pull_codec=config.pull_codec)
    has_all = modes_that_may_come(config) == ("sync",) or config.pull_copies == "on"
    pulls = [each.pull if has_all or each.pull.is_none else _LEAST_PULL for each in LADDER]
    return tuple(
        dict.fromkeys(
            Codecs(
                push=each.push if config.push_codec is None else given.push,
                pull=pull if config.pull_codec is None else given.pull,
            )
            for each, pull in zip(LADDER, pulls, strict=True)
        )
    )


def coded(config: RunConfig) -> Codecs:
    """Of the settings, for a run whose schedule names no codecs; of ``codec = auto`` at first."""
    if is_auto(config):
        return ladder_of(config)[0]
    return codecs_of(codec=config.codec, push_codec=config.push_codec, pull_codec=config.pull_codec)


def coded_by_round(config: RunConfig) -> tuple[CodecsFrom, ...]:
    """Ascending; neighbours differ. What psdist chooses within the run is not known here."""
    found: list[CodecsFrom] = []
    for part in parts_of(config):
        codecs = coded(config) if part.codecs is None else part.codecs
        if not found or codecs != found[-1][1:]:
            found.append(CodecsFrom(part.mode.round, *codecs))
    return tuple(found)


def codecs_that_may_come(config: RunConfig) -> tuple[Codecs, ...]:
    """In any round, those of round 0 first."""
    if is_auto(config):
        return ladder_of(config)
    return tuple(Codecs(push, pull) for _, push, pull in coded_by_round(config))


def has_codecs(config: RunConfig) -> bool:
    """Whether anything is coded, in any round."""
    return not all(push.is_none and pull.is_none for push, pull in codecs_that_may_come(config))


def refusal_of_codecs(config: RunConfig, *, has_float64: bool = False) -> str:
    """Why this run cannot have its codecs, of all its modes and rounds; "" where it can.
    ``has_float64``: whether the model has such parameters."""
    named = [(each.mode.mode, each.codecs) for each in parts_of(config) if each.codecs is not None]
    settings = ladder_of(config) if is_auto(config) else (coded(config),)
    of_settings = [(mode, each) for mode in modes_that_may_come(config) for each in settings]
    for mode, codecs in named or of_settings:
        if wrong := refusal(
            *codecs,
            mode=mode,
            has_copies=config.pull_copies == "on",
            pipeline=config.pipeline,
            has_float64=has_float64,
            has_feedback=config.feedback == "on",
            is_mixed=bool(named) and is_mixed(config),  # else other rounds say more
        ):
            return wrong
    return ""


def contradiction_of_codecs(config: RunConfig) -> str:
    """What does not go with the codecs, and what to do; "" where all does."""
    given = ("codec", "push_codec", "pull_codec")
    beside = [key for key in given if getattr(config, key) is not None]
    names_codecs = any(part.codecs is not None for part in parts_of(config))
    if names_codecs and beside:
        return (
            f"schedule = {config.schedule!r} with {beside[0]} = {getattr(config, beside[0])}: the "
            f"schedule says the codecs of every round; leave out {' and '.join(beside)}, or the "
            "codecs in the schedule"
        )
    if config.pull_copies == "on" and is_mixed(config) and not names_codecs:
        return (
            "pull_copies = on in a run whose mode may change to or from sync, where all groups "
            "hold the same: leave pull_copies off, let only ssp and async come, or name the codecs "
            "in a schedule, with none for pulls in sync"
        )
    return refusal_of_codecs(config)
