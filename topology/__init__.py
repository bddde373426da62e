"""The mapper: which rank serves, which works, in which group, on which cores, at what cost.

Rooms, each importing only those before it: ``text`` (what comes from outside), ``machine`` (a
host), ``network`` (hosts and switches), ``solver`` (the problem in numbers), ``plan`` (who sits
where), then ``draw`` and ``emit``. Needs neither torch nor MPI, so that ``psdist plan`` runs on a
login node. Its only import from psdist is ``errors``. Imported as ``psdist.topology``.
"""

if __name__ != "psdist.topology":
    raise ImportError(
        "this folder is the package psdist.topology; import it by that name: under a second name "
        "its classes would be other classes than the ones psdist itself uses"
    )
