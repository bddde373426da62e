"""The recorded history of a run, for ``psdist check`` (docs/history.md).

``writers`` records it, ``files`` and ``lines`` read it, ``summary`` reads summary.json, and
``rules`` judges.
"""
