"""Rounds of several local steps: the script's optimizer on each worker, another one on the servers.

``trainer`` is the iteration with rounds, ``outer`` makes the servers' optimizer, ``inner`` is what
the script holds. With ``local_steps = 1`` nothing of this is made.
"""
