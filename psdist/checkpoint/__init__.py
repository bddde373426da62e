"""Checkpoints as files: RUN_DIR/checkpoints/step-N, complete or not there
(docs/guides/checkpoints.md).

``folder`` is the folder of a run's checkpoints and the two-step commit, ``reading`` one checkpoint
and its proof, ``index`` its index.json, ``container`` a safetensors file, ``tensors`` writes one,
``states`` describes optimizer state, ``plain`` and ``tree`` turn plain values and trees of tensors
into JSON and back, ``disk`` is the seam to the file system, ``strict`` JSON and files from outside.
Imports protocol, errors and topology/text; no MPI. Modules that must work without torch (a list of
checkpoints, their proof) import neither ``tensors`` nor ``tree``. Nothing is ever unpickled.
"""
