"""The part of an iteration that finishes after ``step()`` has returned (``overlap = full``).

``steps`` is the step strategy, which decides if ``step()`` may return early, ``tail`` waits for
replies and puts them in place, ``guarded`` detects reads of parameters. ``pipelined`` is the
strategy in which the next ``step()`` awaits the replies (``pipeline = 1``). psdist.workers.early
sends what leaves during backward.
"""
