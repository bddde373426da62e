"""Which servers have died, and where they are served now, as a worker hears of it; pure.

The network tells of a death, the coordinator who goes on in the dead one's place. What was sent is
sent again when both are known: nothing of the dead server's comes any more then, and there is
somebody to send it to. Who has taken a place may die in turn: with it go all servers that were
served there.

    moves = Moves()
    moves.on_lost(1)                      # []
    moves.on_moved(1, host=2)             # [(1, 2)]: send again what server 1 has not answered
    moves.on_lost(2)                      # []
    moves.on_moved(1, host=3)             # [(1, 3)]
"""

from __future__ import annotations


class Moves:
    def __init__(self, before: Moves | None = None) -> None:
        """``before``: what was known when this one began."""
        self._lost: set[int] = set(before._lost) if before else set()
        """Servers whose processes have died."""
        self._told: dict[int, int] = dict(before._told) if before else {}
        """Server -> whose process serves it, as the coordinator has said last."""
        self._at: dict[int, int] = dict(before._at) if before else {}
        """Server -> to whose process what it is sent goes; its own where nothing stands here."""

    def on_lost(self, server: int) -> list[tuple[int, int]]:
        """The network says that the process of ``server`` has died. Servers that are served
        elsewhere from now on, and where."""
        self._lost.add(server)
        return self._move()

    def on_moved(self, server: int, *, host: int) -> list[tuple[int, int]]:
        """The coordinator says whose process serves ``server``; as :meth:`on_lost`."""
        self._told[server] = host
        return self._move()

    def _move(self) -> list[tuple[int, int]]:
        moved = [
            (server, host)
            for server, host in sorted(self._told.items())
            if self._at.get(server, server) in self._lost - {host} and host not in self._lost
        ]
        self._at.update(moved)
        return moved
