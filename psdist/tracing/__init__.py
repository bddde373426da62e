"""Spans of a run: what each rank did when, for ``psdist run --trace`` and ``psdist trace``.

Lives here: the file that a rank writes (``spans``, ``tracer``, ``files``), how clocks of hosts are
laid over one another (``clocks``), and what is made of all files: Perfetto's (``perfetto``), what
of the communication was hidden behind computation (``shares``), a picture of one step
(``picture``). What records is at the loops and the trainer (``psdist.workers.traced``,
``psdist.servers.traced``).

Must not import servers, workers, transport or protocol. Needs neither MPI nor torch.
"""
