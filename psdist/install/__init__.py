"""What is installed and what started this process: the MPI library, mpirun, the launcher.

``mpi`` finds the library and the mpirun that belongs to it, ``launcher`` reads the environment that
srun or mpirun left, ``distributions`` finds other distributions that provide psdist, ``trials``
runs trials in processes of their own, ``room`` checks what this host must have left for MPI, and
``quirks`` has the remedies for faults of others. Imports errors only; starts MPI only in a trial's
own process.
"""
