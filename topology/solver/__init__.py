"""Where servers sit and how much of the model each holds, as a problem on a tree of numbers.

``problem`` has the types and the formula of the cost, ``filling`` and ``bound`` the
tools and the proof (docs/placement.md), ``placement`` the choice; ``divisions`` is the choice where
a server costs a worker. Pure arithmetic: no hosts, racks, ranks or files; imports errors only.
"""
