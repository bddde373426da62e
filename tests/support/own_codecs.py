"""Codecs as users write them, right and wrong: psdist.codecs.schemes.own takes them by name."""

from __future__ import annotations

import random
import zlib

import torch


class Halves:
    """float16 to nearest, without zeros at the end: payloads differ in size."""

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        halves = values.clamp_(-65504, 65504).half()
        (places,) = halves.nonzero(as_tuple=True)
        num = int(places[-1]) + 1 if len(places) else 1
        return halves[:num].view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        values = torch.zeros(num_values)
        halves = payload.view(torch.float16)
        values[: len(halves)] = halves
        return values

    def bound(self, num_values: int) -> int:
        return 2 * num_values


class Squeezed(Halves):
    """The same, by zlib."""

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        packed = zlib.compress(super().encode(values, seed=seed).numpy().tobytes(), level=1)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        opened = zlib.decompressobj().decompress(payload.numpy().tobytes(), 2 * num_values)
        return super().decode(torch.frombuffer(bytearray(opened), dtype=torch.uint8), num_values)

    def bound(self, num_values: int) -> int:
        return 2 * num_values + 64


class Raising(Halves):
    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        raise ArithmeticError(f"no seed\nlike {seed}")


class TooLong(Halves):
    def bound(self, num_values: int) -> int:
        return num_values


class Unbounded(Halves):
    def bound(self, num_values: int) -> int:
        return num_values / 2  # type: ignore[return-value]


class Short(Halves):
    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        return super().decode(payload, num_values)[:-1]


class Doubles(Halves):
    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        return super().decode(payload, num_values).double()


class Listed(Halves):
    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        return values.tolist()  # type: ignore[no-any-return]


class Infinite(Halves):
    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        return 1 / super().decode(payload, num_values)


class Fickle(Halves):
    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        return super().decode(payload, num_values) + random.random()


class Chancy(Halves):
    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        return super().encode(values + random.random(), seed=seed)


class Tiring(Halves):
    """Called for every vector except those of psdist's trial."""

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:
        if values[0] not in (-1, 0):
            raise ValueError(f"tired of {values[0]}")
        return super().encode(values, seed=seed)


class WithoutBound:
    encode, decode = Halves.encode, Halves.decode


class WithArguments(Halves):
    def __init__(self, ratio: float) -> None:
        self.ratio = ratio


NOT_CALLABLE = 7
