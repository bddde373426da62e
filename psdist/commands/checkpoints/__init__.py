"""``psdist checkpoint list``, ``verify``, ``diff`` and ``psdist export``, without MPI.

``finding`` is which checkpoint a path means, ``listing`` the list and the proof (without torch),
``comparing`` two checkpoints, ``exporting`` a model's file, ``dcp`` torch's distributed format.
"""
