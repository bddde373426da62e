"""Small faults planted in the protocol: which of them do the fast tests notice?

    python -m tests.mutation --seed 1                  # 300 mutants, drawn by the seed
    python -m tests.mutation --seed 1 --count 10       # a small sample; .ci/run plays one
    python -m tests.mutation --all --in servers/protocol/chunks/receive_pool.py

A *mutant* is one file with one fault. ``scope`` says which files and which tests; ``operators`` and
``neighbours`` make the mutants; ``coverage_map`` knows which tests reach which line; ``children``
runs a mutant's tests in a process of its own, in which ``inside`` stands in for the import system
and pytest; ``equivalent`` is the list of those that change nothing. Imports nothing of psdist: each
child imports it again, with the fault. docs/dev/mutation.md has the results.
"""
