"""An end of a line: what its kernel asks the other's, and how a line has ended."""

from __future__ import annotations

import socket
from typing import Final

from psdist.reach.greeting import GOODBYE
from psdist.reach.watch import End

_ASKS: Final = 4
"""So many unanswered questions before a line is silent."""
_MOST_S: Final = 32767
"""More seconds the kernel does not take."""
_CLOSED: Final = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)


def ask_on(connection: socket.socket, timeout_s: float) -> None:
    """From now on this host's kernel asks the other's whether it is there, ``_ASKS`` times in
    ``timeout_s``, in whole seconds; the line ends when nothing at all has come for so long. (man 7
    tcp: keepalive, TCP_USER_TIMEOUT.)"""
    every_s = min(max(1, round(timeout_s / _ASKS)), _MOST_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKS)
    milliseconds = min(round(1000 * timeout_s), 2**31 - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def end_of(connection: socket.socket) -> End:
    """How a line has ended that has something to read; waits where it has not."""
    try:
        said = connection.recv(len(GOODBYE))
    except _CLOSED:
        return End.CLOSED
    except OSError:  # timed out, or the kernel's last word was that there is no way
        return End.SILENT
    return End.GOODBYE if said == GOODBYE else End.CLOSED


def say_goodbye(connection: socket.socket) -> None:
    """The other end is to know that this one ends on purpose. Does not wait."""
    try:
        connection.send(GOODBYE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended by itself
        return
