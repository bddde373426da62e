"""What ``codec = auto`` goes with: one function decides, and docs/controller.md has its table.

contradiction_of_auto_codec(config)        # "" where the run can be

python -m psdist.config.auto_codec         # the table
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.beside import Other, refusal, table
from psdist.config.codec_rounds import is_auto, ladder_of
from psdist.config.codec_specs import BURST
from psdist.config.combinations import text_of_both

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_ONE = "what rounds take says one thing at a time: the mode, its bound or the codecs"
_TRIED = "codecs that psdist changes were not tried with it yet"
_LENGTH = (
    "rounds become longer and shorter meanwhile, so what they took with one codec says nothing of "
    "another"
)

OTHERS: Final = (
    Other({"mode": "ssp"}, ""),
    Other({"mode": "async"}, ""),
    Other({"mode": "auto"}, _ONE, "mode = sync, ssp or async"),
    Other({"staleness_to": 1, "mode": "ssp", "staleness": 0}, _ONE, "no staleness_to"),
    Other({"schedule": "0: sync; 100: ssp:2"}, "one of them says the codecs", "no schedule"),
    Other(
        {"set_mode": "allowed"},
        "what rounds took in one mode says nothing of another, and which codecs there are depends "
        "on it",
        "set_mode = refused",
    ),
    Other({"push_codec": "int8"}, ""),
    Other({"pull_codec": "int8"}, ""),
    Other(
        {"feedback": "off"},
        "what one codec has left out would be lost when another one comes",
        "feedback = on",
    ),
    Other(
        {"backup": 1},
        "a group tells nothing of rounds that it misses, so what a round takes is not known",
        "backup = 0",
    ),
    Other({"freeze_step": 500}, ""),
    Other({"local_steps": 2}, ""),
    Other({"steps_by": "speed", "local_steps": 2}, _LENGTH, "steps_by = count"),
    Other({"steps_by": "loss", "local_steps": 2}, _LENGTH, "steps_by = count"),
    Other({"max_deaths": 1}, ""),
    Other({"replication": "buddy", "servers": 2}, ""),
    Other({"resume": True}, ""),
    Other({"overlap": "full"}, ""),
    Other({"group": "node"}, ""),
    Other({"checkpoint_every": "100"}, ""),
)


def contradiction_of_auto_codec(config: RunConfig) -> str:
    """What does not go with ``codec = auto``, and what to do; "" where all does."""
    if not is_auto(config):
        if config.error_budget is not None:
            return (
                f"error_budget = {config.error_budget:g} with codec = {config.codec or 'none'}: it "
                "is what codec = auto keeps to; set codec = auto, or leave error_budget out"
            )
        if config.loss_patience is not None:
            return (
                f"loss_patience = {config.loss_patience} with codec = {config.codec or 'none'}: it "
                "is what codec = auto keeps to; set codec = auto, or leave loss_patience out"
            )
        return ""
    if refused := refusal(config, OTHERS, mine="codec = auto", off="another codec"):
        return refused
    if any(push.burst for push, _ in ladder_of(config)):
        return (
            f"codec = auto with push_codec = {config.push_codec}: psdist judges codecs by what "
            "they leave out of every round, and one that goes in full leaves out nothing; leave "
            f"out +{BURST}, or codec = auto"
        )
    if len(ladder := ladder_of(config)) == 1:
        return (
            f"codec = auto with push_codec = {config.push_codec} and pull_codec = "
            f"{config.pull_codec}: nothing is left to choose but {text_of_both(ladder[0])}; leave "
            "out codec, or one of the others"
        )
    if config.error_budget is not None and config.push_codec is not None:
        return (
            f"error_budget = {config.error_budget:g} with push_codec = {config.push_codec}: it is "
            "what pushes may leave out, whose codec is given; leave out one of them"
        )
    return ""


if __name__ == "__main__":
    print(table(OTHERS), end="")
