"""The codecs, a module for each kind: ``quantized``, ``sign``, ``sparse``, ``low_rank``; ``plain``
has casts and unchanged values, ``packed`` compresses the payload of another codec, ``own`` has
codecs of users, and ``raw`` is used without a codec. Imports psdist/codecs/__init__.py and
blocks.py.

The codec that the settings name.

codec_of(parse_codec("topk:0.01"), has_feedback=True)
"""

from __future__ import annotations

from psdist.codecs import RAW, Codec, Raw
from psdist.codecs.schemes.low_rank import LowRank
from psdist.codecs.schemes.own import own_codec
from psdist.codecs.schemes.packed import Packed
from psdist.codecs.schemes.plain import Cast, Plain
from psdist.codecs.schemes.quantized import Quantized
from psdist.codecs.schemes.sign import Sign
from psdist.codecs.schemes.sparse import RandK, TopK
from psdist.config.codec_specs import LOW_RANK, OWN, QUANTIZED, CodecSpec
from psdist.errors import InvariantError


def codec_of(spec: CodecSpec, *, has_feedback: bool) -> Codec | Raw:
    """Return the codec. ``has_feedback``: later messages send what one message leaves out. Raises
    :class:`psdist.errors.CodecError` for a codec of the user's own that does not fit."""
    if spec.is_none:
        return RAW
    if spec.is_packed:
        codec = codec_of(spec._replace(is_packed=False), has_feedback=has_feedback)
        assert not isinstance(codec, Raw)
        return Packed(codec)
    if spec.is_cast:
        return Cast(spec.name)
    if spec.name in QUANTIZED:
        return Quantized(spec.name, is_stochastic=spec.is_stochastic)
    if spec.name == "topk":
        return TopK(spec.ratio)
    if spec.name == "randk":
        return RandK(spec.ratio, is_scaled=not has_feedback)
    if spec.name == LOW_RANK:
        return LowRank(spec.rank)
    if spec.name == OWN:
        return own_codec(spec.target)
    if spec.name == "none":
        return Plain()
    if spec.name == "sign":
        return Sign()
    raise InvariantError(f"codec {spec.name!r} has no class here")
