"""Which servers have died, and where they are served now, as a worker hears of it; pure.

The network tells of a death, the registrar who goes on in the dead one's place. What was sent is
sent again when both are known: nothing of the dead server's comes any more then, and there is
somebody to send it to.

    moves = Moves()
    moves.on_lost(1)                      # None
    moves.on_moved(1, host=2)             # 2: send again what server 1 has not answered
"""

from __future__ import annotations


class Moves:
    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._hosts: dict[int, int] = {}

    def on_lost(self, server: int) -> int | None:
        """The network says that it has died. Who serves in its place, where that is known, too."""
        self._lost.add(server)
        return self._hosts.get(server)

    def on_moved(self, server: int, *, host: int) -> int | None:
        """The registrar says who serves in its place; None until the network has told, too."""
        self._hosts[server] = host
        return host if server in self._lost else None
