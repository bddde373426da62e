"""One host: its processors with their places, memory, GPUs and network cards.

``machine`` is the type that all else in the mapper reads. ``live`` makes it for this host, from
``hwloc`` (lstopo's XML) or ``sysfs`` (with ``sysfs_devices`` and ``kernel_files``); ``numa`` and
``pci`` are what both know of memory and of links. ``gpus`` says which GPUs this process sees,
``binding`` binds it to PUs; ``codec`` and ``packed`` let a machine travel between ranks. lstopo is
started and /sys read here and nowhere else in the mapper. Knows no other hosts, no ranks and no
roles: imports text and errors only.
"""
