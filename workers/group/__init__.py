"""The collectives of a group: workers close together that reduce their gradients before they push.

``channel`` is the seam; ``shared_memory`` (with ``segments``, ``free_memory``), ``process_group``,
which is torch.distributed (with ``connected``), ``reductions``, which is NCCL's own, ``mpi``,
``two_levels``, ``virtual`` and ``alone`` implement it, and ``tier`` chooses.
``buckets`` reduces gradients with it while they come. Imports errors and psdist/protocol, and
``virtual`` the virtual network too. Knows nothing of servers, chunks' clocks or modes.
"""
