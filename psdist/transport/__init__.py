"""The seam for the network (``base``), and the two networks behind it: ``mpi`` and ``virtual``.

``waiting`` says what a rank does between two polls that brought nothing, ``generations`` which
messages belong to the job that goes on. Knows frames, headers and
peers; knows nothing of servers, workers or consistency. mpi4py's exceptions end here.
"""
