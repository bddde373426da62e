"""Gradients that leave before ``step()``: whether they may, when, and what if that was wrong.

``overlap`` is the step strategy, ``early_pushes`` pushes chunks, ``group_overlap`` and
``group_pushes`` do the same for a worker in a group of several, ``progress`` drives the loop while
the script computes. Nothing here decides what a server does with a chunk.
"""
