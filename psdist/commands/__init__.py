"""The command line: ``psdist run``, ``plan``, ``check``, ``doctor``, ``bench`` and ``probe``.

``cli`` turns words into calls; every other module is one command, imported only when it is called,
but for those that say what ``run`` runs, and ``launch``, the parent of mpirun.
A command may import every other room, no room imports a command, and ``cli`` imports neither torch
nor MPI, so that ``psdist --help`` and ``psdist plan`` answer on a login node.
"""
