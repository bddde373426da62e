"""The collectives of a group: workers close together that reduce their gradients before they push.

``channel`` is the seam and ``operations`` runs all operations. ``shared_memory`` (with
``segments``), ``process_group`` (torch.distributed), ``reductions`` (NCCL's own), ``mpi`` and
``two_levels`` implement the seam; ``tier`` chooses. ``buckets`` reduces gradients during the
backward pass. ``shrinking`` and ``rebuilding`` let a group continue after a failure. This room
imports errors and psdist/protocol. It must not import servers or modes.
"""
