"""A job of which rank 1 is killed by SIGKILL while it starts: as it comes to the call that BEFORE
names, one of psdist.ranks.connecting's."""

from __future__ import annotations

import os
import signal
from typing import Any

import psdist
from psdist.ranks import connecting


def main() -> None:
    name = os.environ["BEFORE"]
    call = getattr(connecting, name)

    def die(*given: Any, **named: Any) -> Any:
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **named)

    setattr(connecting, name, die)
    psdist.init()


if __name__ == "__main__":
    main()
