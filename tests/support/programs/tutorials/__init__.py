"""Training loops as PyTorch's tutorials write them, with psdist's four lines.

What else had to change is in docs/guides/tutorials.md; tests/mpi/test_tutorials.py runs them.
"""
