"""The server's state machine: events in, actions out, no I/O.

A push enters ``state``, waits for a slot in ``receive_pool``, for what it was made under in
``settings``, and is applied by ``gathering`` (sync) or ``on_arrival`` (ssp, async), which share
``updates``. ``replies`` parks its reply, and a late pull's, until ``policy`` allows it by the
``chunk_clock``. ``chunk_state`` is what is known of one chunk, ``frontier`` the chunk that sync
must serve first, ``membership`` who is there. ``registrar`` is server 0's second machine: who has
come to a collective, who is done; ``lobby`` comes before it: who has called psdist.init.
``actions`` is what the loop executes. Imports psdist/protocol and errors only: no torch, no MPI, no
time, no randomness; the same objects run over MPI, in tests and in simulations.
"""
