"""Start MPI in a process whose heap holds no zeros, and print the size of the world.

What MPICH publishes then makes lines that Slurm's pmi2 plugin cannot read
(psdist.install.quirks).
"""

import ctypes

from psdist.ranks.agreement import start_mpi

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = []
for _ in range(400):
    blocks.append(libc.malloc(16384))
    ctypes.memset(blocks[-1], 0xAB, 16384)
# Every other one: pieces between two that are in use are handed out again as they are.
for block in blocks[::2]:
    libc.free(block)

print(f"one of {start_mpi().Get_size()}")
