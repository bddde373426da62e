"""Control messages in the snapshots of the coordinator (psdist.controller.snapshots); pure.

_STATE: Final = Schema(tuple[dict[int, Annotated[Progress, OnWire]]])
"""

from __future__ import annotations

from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from psdist.protocol.control import Control, decode_control, encode_control


class OnWire:
    """Marks a message of the annotated type: its snapshot is what is sent on the wire."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Control], _handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def decode(data: Any) -> Control:
            if not isinstance(data, bytes):
                raise ValueError(f"{type(data).__name__} instead of a message")
            message = decode_control(data)
            if not isinstance(message, source):
                raise ValueError(f"{type(message).__name__} instead of {source.__name__}")
            return message

        return core_schema.no_info_plain_validator_function(
            decode, serialization=core_schema.plain_serializer_function_ser_schema(encode_control)
        )
