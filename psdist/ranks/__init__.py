"""A rank's life around its role: starting MPI, agreeing on one configuration and one plan, failing.

``agreement`` brings all ranks to one configuration or one error, ``seats`` (a room) to one plan and
what each has of its host, ``context`` is a rank's view of the job from then on, ``lobby`` where
ranks wait for a job to begin, ``server`` the life of a server rank, ``failure`` turns an error into
one line and the end of the job. ``checkpointing`` (a room) is a rank's part in checkpoints,
``telling`` (a room) what people hear of the run. ``run_files`` writes the first files of a run,
``parent_link`` is a rank's line to ``psdist run -n``, ``loading`` makes the import of torch quick.
A worker's life is the user's script: psdist.job; ``plain_script`` covers scripts that python starts
directly.
"""
