"""Rounds of several local steps, and one exchange for all of them.

``trainer`` is the iteration in rounds; ``differences`` lets the script's optimizer step on each
worker (``inner`` is what the script holds, and makes the servers'), ``sums`` adds gradients
up. With ``local_steps = 1`` nothing of this is made.
"""
