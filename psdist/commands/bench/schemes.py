"""The schemes of ``psdist bench convergence``: psdist's settings, and DDP's hooks; without torch.

    scheme_of("codec=int4/sign local_steps=2")      # settings, as --set has them, with spaces
    rival_of("powersgd:4")                          # DDP with that hook

A scheme's settings win over all other sources. Only settings that each job may choose again are
allowed. The defaults are the mode sync and no codec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from psdist.config.sources import Resolved, resolve
from psdist.errors import UsageError

PLAIN: Final = {"mode": "sync", "codec": "none", "local_steps": "1"}
BASELINE: Final = "sync, no codec"
TASKS: Final = ("digits", "chars")
ALLOWED: Final = (
    *("mode", "staleness", "pipeline", "codec", "push_codec", "pull_codec", "feedback"),
    *("pull_copies", "codec_exact", "local_steps", "outer", "overlap"),
)
_POWER_SGD: Final = re.compile(r"powersgd:([1-9][0-9]?)")


class Scheme(NamedTuple):
    name: str
    settings: Mapping[str, str]

    def resolved(self, common: Mapping[str, str], environment: Mapping[str, str]) -> Resolved:
        """With what all schemes have in ``common``; raises :class:`ConfigError`."""
        # As options: the flat names of a scheme are not deprecated.
        given = {f"--{key}": value for key, value in {**PLAIN, **self.settings}.items()}
        return resolve(command_line={**common, **given}, environment=environment)


class Rival(NamedTuple):
    """DistributedDataParallel, all workers in one group."""

    name: str
    hook: str
    rank: int = 0
    """Rank of PowerSGD's matrices."""


def baseline() -> Scheme:
    return Scheme(BASELINE, {})


def scheme_of(text: str) -> Scheme:
    """Raises :class:`UsageError`."""
    settings: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in ALLOWED:
            raise UsageError(
                f"--scheme {text!r:.80}: {word!r:.40} is none of a scheme's settings; write "
                f"KEY=VALUE with spaces between, with KEY one of {', '.join(ALLOWED)}"
            )
        if key in settings:
            raise UsageError(f"--scheme {text!r:.80}: {key} is given twice")
        settings[key] = value
    if not settings:
        raise UsageError("--scheme '': a scheme has at least one setting, such as codec=int8")
    return Scheme(" ".join(f"{key}={value}" for key, value in settings.items()), settings)


def rivals_of(text: str) -> list[Rival]:
    """Return the rivals in a list with commas; "none" is the empty list. Raises
    :class:`UsageError`."""
    if text.strip() == "none":
        return []
    return [rival_of(each.strip()) for each in text.split(",")]


def rival_of(text: str) -> Rival:
    if text == "plain":
        return Rival("DDP", "plain")
    if text == "fp16":
        return Rival("DDP, fp16", "fp16")
    if match := _POWER_SGD.fullmatch(text):
        return Rival(f"DDP, PowerSGD rank {match[1]}", "powersgd", int(match[1]))
    raise UsageError(
        f"--ddp: {text!r:.40} is none of DDP's ways; write plain, fp16 or powersgd:K (K from 1 to "
        "99) with commas between, or none"
    )


def require_different(names: Sequence[str]) -> None:
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise UsageError(f"{twice} is to be measured twice; name each scheme once")


def require_task(name: str, width: int | None) -> None:
    """Raises :class:`UsageError` unless there is such a task, with a model of such a width."""
    if name not in TASKS:
        raise UsageError(f"--task {name} is neither {' nor '.join(TASKS)}")
    if width is not None and name != "chars":
        raise UsageError(f"--width {width}: the model of {name} has none; leave it out")
    if width is not None and width % 4:
        raise UsageError(f"--width {width} is no multiple of 4, the number of attention heads")
