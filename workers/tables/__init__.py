"""Tables on a worker: the modules of a script, and the loop that brings and sends their rows.

``modules`` are what a script uses, ``gradients`` what backward has made for rows, ``loop`` the
messages of the set of tables, ``follower`` a step of it, ``foresight`` the ids of the next batch.
psdist.table_assembly makes them in ``job.prepare``.
"""
