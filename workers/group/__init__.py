"""The collectives of a group: workers close together that reduce their gradients before they push.

``channel`` is the seam; ``shared_memory`` (with ``segments``), ``process_group``, which is
torch.distributed, ``reductions``, which is NCCL's own, ``mpi`` and ``two_levels`` implement it, and
``tier`` chooses. ``buckets`` reduces gradients with it while they come. Imports errors and
psdist/protocol; nothing of servers, chunks' clocks or modes.
"""
