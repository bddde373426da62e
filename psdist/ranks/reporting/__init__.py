"""Reports to users: the status of a run, its progress, failures and summary.

``run_status`` is the one model. ``progress`` compares the groups, ``status`` writes status.json,
``summary`` makes summary.json, with ``coding`` for what codecs have saved, and ``lines`` has the
report at the end. ``recording`` writes the history's lines on psdist's own choices. No module here
may import the other modules of psdist.ranks.
"""
