"""Rounds of several local steps, and one exchange for all of them.

``local_steps`` is the step strategy, which wraps another one; ``differences`` lets the script's
optimizer step on each worker (``inner`` is the optimizer that the script holds, and makes the
servers'), ``sums`` adds gradients up. With ``local_steps = 1`` none of these is made.
"""
