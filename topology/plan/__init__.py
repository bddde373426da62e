"""Who sits where: role, group, cores and GPU of every rank, and what an exchange costs.

``plan`` is the type that goes to all ranks and into plan.json (``codec``); ``planning``
makes it, with ``serving_hosts`` for which hosts serve and ``seating`` for the seats inside a host;
``what_if`` plans changes. Pure: reads no file, starts nothing, and knows no launcher. Imports
solver, network, machine, text and errors only.
"""
