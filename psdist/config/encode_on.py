"""Where pushes are encoded, on the host or on the device of the gradients: which codecs have a form
for devices (psdist.codecs.base.OnDevice).

    why_on_host(config)                    # "" where a device may encode all that may be pushed
    contradiction_of_encoding(config)      # "" where encode_on goes with the codecs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from psdist.config.codec_rounds import codecs_that_may_come
from psdist.config.codec_specs import LOW_RANK, OWN, CodecSpec
from psdist.config.combinations import text_of

if TYPE_CHECKING:
    from psdist.config.settings import RunConfig

_FORMS: Final = "fp16, bf16, int8, int4, int2, sign or topk:R"


def why_on_host(config: RunConfig) -> str:
    """Why the host encodes whatever this run pushes."""
    if config.encode_on == "host":
        return "encode_on = host"
    pushes = dict.fromkeys(each.push for each in codecs_that_may_come(config))
    if all(push.is_none for push in pushes):
        return "pushes have no codec"
    wrong = ((push, _why_on_host(push)) for push in pushes)
    return next((f"push_codec = {text_of(push)}: {why}" for push, why in wrong if why), "")


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


def contradiction_of_encoding(config: RunConfig) -> str:
    """What does not go with ``encode_on``, and what to do; "" where all does."""
    if config.encode_on != "device" or not (why := why_on_host(config)):
        return ""
    return (
        f"encode_on = device, but {why}; set encode_on = auto, with which the host encodes where a "
        f"device cannot, or push_codec = {_FORMS}"
    )
