"""The hosts and the tree of switches that joins them, with the speed of each link.

``cluster`` is the type that planning and drawing read; ``sources`` makes it out of machines and a
``tree``, which ``slurm``, ``topology_yaml``, ``infiniband`` (with ``fabric``) or ``rack_table``
read from files and environment; ``host_files`` are hosts and slots without racks. ``catalogue`` is
network.json, the speeds that psdist probe measured, and ``changes`` what got slower between two of
them; ``same_host`` says which names mean one host.
Measures nothing and places nobody: imports machine, text and errors only.
"""
