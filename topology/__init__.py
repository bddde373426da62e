"""Import me as ``psdist.topology``."""

if __name__ != "psdist.topology":
    raise ImportError(
        "this folder is the package psdist.topology; import it by that name: under a second name "
        "its classes would be other classes than the ones psdist itself uses"
    )
