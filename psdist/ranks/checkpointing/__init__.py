"""A rank's part in checkpoints, and in going on from one.

``files`` is what a server writes of its own and what the coordinator makes of it all,
``worker_files`` what a worker writes; ``resuming`` chooses the checkpoint that a run goes on from
and sets the attempt before aside, ``fidelity`` and ``ruling`` what of psdist's own choices and of
modes it goes on with; ``script_signals`` is what signals ask of a worker whose script
trains. The state machines decide when a checkpoint begins and whether it is complete; what files
look like is psdist.checkpoint's. ``resuming`` and ``script_signals`` must not import the others.
"""
