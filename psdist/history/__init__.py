"""The recorded history of a run, and the rules that ``psdist check`` proves from it.

``records`` is the layout on disk (docs/history.md), ``writers`` record, ``replay`` recomputes what
every version of a chunk contained, ``apply_rules`` and ``use_rules`` judge, ``findings`` counts.
Imports nothing of servers or workers: a proof that shares code with what it judges proves nothing.
"""
