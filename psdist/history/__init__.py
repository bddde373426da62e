"""The recorded history of a run, and the rules that ``psdist check`` proves from it.

``records`` and ``run_record`` are the layout on disk (docs/history.md), ``writers`` record into
``recorder``'s files, ``files`` reads them, ``summary`` reads what the run says of itself;
``rules`` recompute what every version of a chunk contained, and judge.
Imports nothing of servers or workers: a proof that shares code with what it judges proves nothing.
"""
