"""``psdist checkpoint list``, ``verify``, ``diff`` and ``psdist export``, without MPI.

``listing`` finds checkpoints, lists and proves them (without torch), ``comparing`` compares two,
``exporting`` writes a model's file or torch's distributed format.
"""
