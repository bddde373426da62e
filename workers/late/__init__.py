"""The part of an iteration that finishes after ``step()`` has returned (``overlap = full``).

``tail`` waits for replies and moves them into place, ``guarded`` tells it who is about to read
which parameter, ``steps`` decides if ``step()`` may return early. ``pipelined``: nobody awaits
replies before the next ``step()`` (``pipeline = 1``). What leaves during backward is
psdist.workers.early's.
"""
