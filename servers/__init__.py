"""Import me as ``psdist.servers``."""

if __name__ != "psdist.servers":
    raise ImportError(
        "this folder is the package psdist.servers; import it by that name: under a second name "
        "its classes would be other classes than the ones psdist itself uses"
    )
