"""Gradients that leave before ``step()``: whether they may, when, and what if that was wrong.

``overlap`` judges a script and corrects, ``early_pushes`` gives chunks away, ``group_overlap`` and
``group_pushes`` are the same for a worker in a group of several, ``progress`` drives the loop while
the script computes, ``overlap_limits`` says where none of it can be. Nothing here decides what a
server does with a chunk.
"""
