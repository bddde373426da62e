"""A machine out of hwloc's XML, of any of its versions.

``xml`` is the way in; ``walk`` goes through the tree, ``elements`` parses it under limits,
``devices`` reads what is attached. What arrives is not trusted. Starts no program:
that is psdist.topology.machine.live's.
"""
