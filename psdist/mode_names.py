"""The names of a run's modes, for every layer: messages and files with another one are refused when
they are read.

    mode: Mode = "ssp"
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

Mode: TypeAlias = Literal["sync", "ssp", "async"]
MODES: Final[tuple[Mode, ...]] = ("sync", "ssp", "async")
"""From the most demanding on: how far groups may be apart."""
ModeSetting: TypeAlias = Literal[Mode, "auto"]
"""Mode of a run in its settings; auto: psdist chooses between sync and ssp."""
