"""The seam for the network (``base``) and its two implementations: ``mpi`` and ``virtual``.

``waiting`` is the pause between two empty polls; ``job_epochs`` keeps the messages of one job out
of the next. This room uses frames, headers and peers. It must not import servers, workers or modes.
mpi4py's exceptions end here.
"""
