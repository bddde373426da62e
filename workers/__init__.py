"""Import me as ``psdist.workers``."""

if __name__ != "psdist.workers":
    raise ImportError(
        "this folder is the package psdist.workers; import it by that name: under a second name "
        "its classes would be other classes than the ones psdist itself uses"
    )
