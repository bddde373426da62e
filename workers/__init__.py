"""A worker: what it decides (``protocol``), the user's ``model`` and ``data``, its ``group``.

``assembly`` puts a worker together, ``trainer`` is one iteration from gradients to new parameters,
``reduction`` the group's part of it, ``early`` (a room) what of it leaves during backward,
``late`` (a room) what is left when ``step()`` has returned,
``values`` are the parameters in memory, ``batches`` what was learnt from, ``pushes`` what is sent
of gradients, ``loop`` carries actions out over the network, ``standing`` reports progress to the
coordinator, ``metrics`` what the script reports. Imported as ``psdist.workers``; never imports
psdist.servers.
"""

if __name__ != "psdist.workers":
    raise ImportError(
        "this folder is the package psdist.workers; import it by that name: under a second name "
        "its classes would be other classes than the ones psdist itself uses"
    )
