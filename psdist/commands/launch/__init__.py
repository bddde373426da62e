"""``psdist run -n N`` as the parent of mpirun: what a user sees and does at the terminal of a job.

``parent`` is the loop; it starts mpirun and talks to the ranks of this host (``ranks``), and writes
what comes from them (``screen``, ``display``) without the launcher's own noise (``noise``).
``ending`` takes signals, decides what follows one, and how the job ended. The ranks' end of the
line is psdist.ranks.parent_link, and psdist.report.facts has the words on it.

Nothing here imports torch, mpi4py or numpy: a parent costs little and is at work while ranks start.
"""
