"""The codecs of each round: given by settings or a schedule, or chosen by psdist.

coded_by_round(config)       # (CodecsFrom(0, push, pull), ...): one entry where nothing changes
ladder_of(config)            # codec = auto: all that it may choose, the least lossy first
codecs_that_may_come(config)
has_codecs(config)
why_on_host(config)          # "" where a device may encode all that is pushed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from psdist.config.codec_specs import (
    LOW_RANK,
    OWN,
    Codecs,
    CodecSpec,
    codecs_of,
    parse_both,
    text_of,
    text_of_both,
)
from psdist.config.modes import mode_by, modes_that_may_come, parts_of

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

AUTO: Final = "auto"
"""The codec of a run in which psdist chooses."""
LADDER: Final = tuple(map(parse_both, ("none", "fp16", "int8", "int4", "int4/sign")))
"""The choices, the least lossy first."""
_LEAST_PULL: Final = LADDER[1].pull
"""The shortest pull that is not relative."""


class CodecsFrom(NamedTuple):
    """From this round on the codecs are these."""

    round: int
    push: CodecSpec
    pull: CodecSpec

    def __str__(self) -> str:
        """Return the codecs as a schedule writes them."""
        return text_of_both(Codecs(self.push, self.pull))


def is_auto(config: RunConfig) -> bool:
    """True if psdist chooses the codecs during the run."""
    return config.codec == AUTO


def is_controlled(config: RunConfig) -> bool:
    """True if psdist changes anything during the run by what it observes."""
    return is_auto(config) or mode_by(config) == "auto"


def ladder_of(config: RunConfig) -> tuple[Codecs, ...]:
    """Return all codecs that ``codec = auto`` may choose, the least lossy first, with which the run
    begins. A direction whose codec is given keeps it. Where groups hold different versions and
    servers have no copies of these (ssp and async without ``pull_copies``), pulls have 16 bits."""
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
    """Return the codecs that the settings give; with ``codec = auto`` those of round 0."""
    if is_auto(config):
        return ladder_of(config)[0]
    return codecs_of(codec=config.codec, push_codec=config.push_codec, pull_codec=config.pull_codec)


def coded_by_round(config: RunConfig) -> tuple[CodecsFrom, ...]:
    """Return the codecs by round, ascending; neighbours differ. Choices that psdist makes during
    the run are not known here."""
    found: list[CodecsFrom] = []
    for part in parts_of(config):
        codecs = coded(config) if part.codecs is None else part.codecs
        if not found or codecs != found[-1][1:]:
            found.append(CodecsFrom(part.mode.round, *codecs))
    return tuple(found)


def codecs_that_may_come(config: RunConfig) -> tuple[Codecs, ...]:
    """Return the codecs of all rounds, those of round 0 first."""
    if is_auto(config):
        return ladder_of(config)
    return tuple(Codecs(push, pull) for _, push, pull in coded_by_round(config))


def has_codecs(config: RunConfig) -> bool:
    """True if anything is coded, in any round."""
    return not all(push.is_none and pull.is_none for push, pull in codecs_that_may_come(config))


def why_on_host(config: RunConfig) -> str:
    """Return why the host encodes the pushes; "" if a device may."""
    if config.encode_on == "host":
        return "codec.encode_on = host"
    pushes = dict.fromkeys(each.push for each in codecs_that_may_come(config))
    if all(push.is_none for push in pushes):
        return "pushes have no codec"
    wrong = ((push, _why_on_host(push)) for push in pushes)
    return next((f"codec.push = {text_of(push)}: {why}" for push, why in wrong if why), "")


def _why_on_host(push: CodecSpec) -> str:
    if push.skip is not None:
        return "whether a push is left for later is decided on the host"
    if push.is_packed:
        return "Zstandard packs on the host"
    if push.is_stochastic or push.name == "randk":
        return "its random numbers are those of the host"
    if push.name == LOW_RANK:
        return "its products of matrices have other bits on each device"
    if push.name == OWN:
        return "a codec of your own is given values on the CPU"
    return ""
