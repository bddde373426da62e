"""The server's state machine: events in, actions out, no I/O.

``state`` takes events and puts the parts together: a push enters there, waits for what it was made
under in ``settings``, and goes through the rooms of ``chunks``, by the ``chunk_clock``;
``membership`` is who is there, ``sets`` the parameter sets of a job, a machine each.
``coordinator`` is server 0's second machine: who has come to a collective, who is done; ``lobby``
comes before it: who has called psdist.init. ``actions`` is what the loop executes. Imports
psdist/protocol and errors only: no torch, no MPI, no time, no randomness; the same objects run over
MPI, in tests and in simulations.
"""
