"""What of an iteration is finished after ``step()`` has returned (``overlap = full``).

``tail`` waits for replies and moves them into place, ``guarded`` tells it who is about to read
which parameter, ``limits`` finds readers that it cannot detect, and says where ``step()`` must not
return early. ``pipelined``: nobody awaits replies before the next ``step()``
(``pipeline = 1``). What leaves during backward is psdist.workers.early's.
"""
