"""What a server decides, without doing any of it: events in, actions out.

A push enters ``state``, waits for a buffer in ``receive_pool``, for its turn in ``chunk_state``, is
gathered or applied as ``policy`` says, and its reply is released when ``chunk_clock`` allows.
``registrar`` is server 0's second machine: who has come to a collective, who is done. ``actions``
is what the loop executes. Imports psdist/protocol and errors only: no torch, no MPI, no time, no
randomness; the same objects run over MPI, in tests and in simulations.
"""
