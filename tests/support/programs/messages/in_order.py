"""Every rank sends every other numbered messages of all sorts; all must be announced in order.

    mpirun -n 3 python -m tests.support.programs.messages.in_order

Payloads are accepted late and in random order. Server 0 says "all in order" when all ranks have
seen the same.
"""

from __future__ import annotations

import os
import random

from psdist.config.sources import resolve
from psdist.protocol.events import Frame, Offered
from psdist.ranks.connecting import connect
from psdist.ranks.rank import Rank
from tests.support.numbered import OrderWatch, send_numbered

COUNT = 400


def main() -> None:
    context = connect(resolve(command_line={}, environment=os.environ))
    exchange(context)
    assert context.comms.world is not None
    context.comms.world.Barrier()  # a rank that had failed would have ended all
    if context.number == 0:
        print("all in order", flush=True)
    context.exit.close()


def exchange(context: Rank) -> None:
    transport, pick = context.endpoint, random.Random(context.number)
    others = [peer for peer in context.roles.rank_of_peer if peer != context.me]
    watch, waiting, offers = OrderWatch(), context.waiting(), []
    for number in range(COUNT):
        for peer in others:
            send_numbered(transport, peer, number)
    while any(watch.complete[peer] < COUNT for peer in others):
        event = transport.poll()
        if event is not None:
            waiting.reset()
            watch.see(event)
            if isinstance(event, Offered):
                offers.append(event)
        if offers and (event is None or len(offers) > 50):
            offer = offers.pop(pick.randrange(len(offers)))
            transport.accept(offer.ticket, Frame(memoryview(bytearray(offer.num_bytes))))
        elif event is None:
            waiting.idle("the other ranks")


if __name__ == "__main__":
    main()
