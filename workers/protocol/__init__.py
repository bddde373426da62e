"""The worker's state machine: events and commands in, actions out, no I/O.

One state machine, WorkerCore in core, put together from a module per subject. Imports
psdist/protocol and errors only: no torch, no MPI, no time, no randomness; the same objects run
over MPI, in tests and in simulations. psdist.workers.loop carries the actions out.
"""
