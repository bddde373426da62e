"""A server: what it decides (``protocol``), what executes that on memory (``shard``), its ``loop``.

Imported as ``psdist.servers``; never imports psdist.workers.
"""

if __name__ != "psdist.servers":
    raise ImportError(
        "this folder is the package psdist.servers; import it by that name: under a second name "
        "its classes would be other classes than the ones psdist itself uses"
    )
