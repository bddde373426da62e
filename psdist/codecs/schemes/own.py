"""Codecs of the user's own, by configuration: ``module:name``.

    # my_codecs.py
    class Halves:
        def encode(self, values, *, seed):             # 1-D float32 on the CPU -> 1-D uint8
            return values.half().view(torch.uint8)

        def decode(self, payload, num_values):         # uint8 -> num_values of float32
            return payload.view(torch.float16).float()

        def bound(self, num_values):                   # the most bytes that encode gives
            return 2 * num_values

    psdist run --push-codec my_codecs:Halves train.py

``name`` is called without arguments, on every rank, and gives the codec. It is imported because the
rank's own configuration says so, never by a message. It must be pure as
:class:`psdist.codecs.Codec` is; it is tried out before anything is sent. With feedback it must
leave out less than it is given, or what is left out grows.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import torch

from psdist.codecs import Varying, has_only_finite
from psdist.errors import CodecError, ProtocolError
from psdist.protocol.header import CodecCode

_MOST_BYTES: Final = 1 << 31
_HEAD: Final = 4
"""Bytes before the user's: a flag that there are any. Four, to keep the rest aligned to float32."""
_TRIED: Final = (1, 255, 1000)
"""Numbers of values with which a codec is tried out."""
_Result = TypeVar("_Result")


class OwnCodec(Protocol):
    """The methods of a user's codec."""

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        """Return the payload (1-D, uint8) of ``values`` (1-D, float32, on the CPU)."""
        ...

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        """Return ``num_values`` values of float32."""
        ...

    def bound(self, num_values: int) -> int:
        """Return the maximum bytes of a payload of ``num_values`` values."""
        ...


@functools.cache
def own_codec(target: str) -> Own:
    """``target``: ``module:name``. Raises :class:`CodecError`."""
    module, _, name = target.partition(":")
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # the user's module: whatever it does while it is imported
        raise CodecError(
            f"codec {target}: is none of psdist's, and cannot be imported ({_described(error)}); "
            "it is imported on every rank, servers too: install it, or set PYTHONPATH"
        ) from error
    try:
        theirs: Any = found()  # type: ignore[operator] # whether it can be called is seen here
    except Exception as error:  # the user's, as above
        raise CodecError(
            f"codec {target}: {name}() raised {_described(error)}; it must give a codec"
        ) from error
    for method in ("encode", "decode", "bound"):
        if not callable(getattr(theirs, method, None)):
            raise CodecError(
                f"codec {target}: {name}() gave {theirs!r:.80}, which has no method {method}; a "
                "codec has encode(values, *, seed), decode(payload, num_values), bound(num_values)"
            )
    codec = Own(target, theirs)
    for num_values in _TRIED:
        codec.try_out(num_values)
    return codec


class Own(Varying):
    """Adapter of a user's codec: its faults become :class:`CodecError`."""

    code = int(CodecCode.OWN)

    def __init__(self, target: str, theirs: OwnCodec) -> None:
        self.name = target
        self._theirs = theirs

    def num_bytes(self, num_values: int) -> int:
        most = self._called("bound", num_values, lambda: self._theirs.bound(num_values))
        if type(most) is not int or not 0 < most <= _MOST_BYTES:
            raise self._wrong("bound", num_values, f"gave {most!r:.80}, not a number of bytes")
        return _HEAD + most

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        num, most = len(values), self.num_bytes(len(values))
        if not has_only_finite(values):
            return torch.zeros(_HEAD, dtype=torch.uint8)
        theirs = values.clone()  # what it is given it may write to
        payload = self._called("encode", num, lambda: self._theirs.encode(theirs, seed=seed))
        self._require_vector("encode", num, payload, torch.uint8)
        if not 0 < len(payload) <= most - _HEAD:
            wrong = f"gave {len(payload)} bytes where bound({num}) is {most - _HEAD}"
            raise self._wrong("encode", num, wrong)
        return torch.cat([torch.ones(_HEAD, dtype=torch.uint8), payload])

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        head = payload[:_HEAD].tolist()
        if head == [0] * _HEAD and len(payload) == _HEAD:
            return torch.full((num_values,), torch.nan)
        if head != [1] * _HEAD or not _HEAD < len(payload) <= self.num_bytes(num_values):
            raise ProtocolError(
                f"codec {self.name}: {len(payload)} bytes that begin with {head} are no payload of "
                f"{num_values} values"
            )
        theirs = payload[_HEAD:].clone()
        values = self._called("decode", num_values, lambda: self._theirs.decode(theirs, num_values))
        self._require_vector("decode", num_values, values, torch.float32)
        if len(values) != num_values:
            raise self._wrong("decode", num_values, f"gave {len(values)} values")
        if not has_only_finite(values):
            raise self._wrong("decode", num_values, "gave values that are not finite")
        return values.detach()

    def try_out(self, num_values: int) -> None:
        """Raises :class:`CodecError` where it does not give the same twice."""
        for values in (torch.linspace(-1, 2, num_values), torch.zeros(num_values)):
            payloads = [self.encode(values, seed=num_values) for _ in range(2)]
            seen = [self.decode(payload, num_values) for payload in payloads]
            for method, (one, other) in (("encode", payloads), ("decode", seen)):
                if not torch.equal(one, other):
                    raise self._wrong(
                        method, num_values, "gave something else for the same arguments again"
                    )

    def _called(self, method: str, num_values: int, call: Callable[[], _Result]) -> _Result:
        try:
            return call()
        except Exception as error:  # the user's: one line names the codec and the call
            raise self._wrong(method, num_values, f"raised {_described(error)}") from error

    def _require_vector(
        self, method: str, num_values: int, found: object, dtype: torch.dtype
    ) -> None:
        if not isinstance(found, torch.Tensor):
            raise self._wrong(method, num_values, f"gave a {type(found).__name__}, not a tensor")
        is_vector = found.dim() == 1 and found.is_contiguous() and found.device.type == "cpu"
        if found.dtype != dtype or not is_vector:
            wrong = f"gave {found.dtype} of shape {tuple(found.shape)} on {found.device}"
            raise self._wrong(method, num_values, f"{wrong}; {dtype} in one piece on cpu belongs")

    def _wrong(self, method: str, num_values: int, wrong: str) -> CodecError:
        return CodecError(f"codec {self.name}: {method} of {num_values} values {wrong}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
