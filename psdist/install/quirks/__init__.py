"""Remedies for faults in launchers and MPI libraries, one module each.

``pmi``: MPICH's lines are longer than Slurm's pmi2 plugin reads. Can be deleted when the plugin
reads the line of every value that it allows, in all Slurm that is supported; or when MPICH is
started through PMIx there.

``pmix``: Slurm's PMIx fence returns before all hosts are in it, and Open MPI crashes. Can be
deleted when that fence waits, in all Slurm that is supported; or when Open MPI takes messages
inside MPI_Init.

``session``: Open MPI's mpirun does not start where one that was killed had the same pid. Can be
deleted when it does, in all Open MPI that is supported.

``home``: Open MPI's programs end where the environment has no HOME. Can be deleted when they
start, in all Open MPI that is supported.

Each module says with which versions the fault was seen and how to find out whether it is gone, and
does nothing where its launcher has not started the process. Imports nothing of psdist.
"""
