"""Values as they are, in float32: sent if some pushes are left for later without another codec."""

from __future__ import annotations

import torch

from psdist.codecs.base import require_size
from psdist.protocol.header import CodecCode


class Plain:
    code = int(CodecCode.PLAIN)
    name = "plain"

    def num_bytes(self, num_values: int) -> int:
        return 4 * num_values

    def encode(self, values: torch.Tensor, *, seed: int) -> torch.Tensor:  # noqa: ARG002 - seam
        return values.view(torch.uint8)

    def decode(self, payload: torch.Tensor, num_values: int) -> torch.Tensor:
        require_size(self, payload, num_values)
        return payload.view(torch.float32)


class Exact(Plain):
    """No codec, in rounds of a run that has one in others: values in the workers' dtype, after the
    head that every payload of such a run has."""

    name = "none"
