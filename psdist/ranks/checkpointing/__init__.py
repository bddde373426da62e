"""A rank's part in checkpoints, and in a resumed run.

``files`` writes a server's file and completes the coordinator's folder, ``worker_files`` writes a
worker's file. ``resuming`` chooses the checkpoint of a resumed run and sets the last attempt aside;
``tuning_state`` and ``ruling`` choose the tuning state and the modes. ``script_signals`` handles
signals to a script. The state machines decide when a checkpoint begins and whether it is complete;
psdist.checkpoint defines its files. ``resuming`` and ``script_signals`` must not import the others.
"""
