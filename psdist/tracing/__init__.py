"""Spans of a run: what each rank did when, for ``psdist run --trace`` and ``psdist trace``.

Lives here: the file that a rank writes (``spans``, ``tracer``, ``files``), how clocks of hosts are
laid over one another (``clocks``), and what is made of all files: Perfetto's (``perfetto``), what
chunks were doing and for whom they waited (``exchange``), where the time of each step went
(``shares``, on sets of times: ``covered``), a picture of one step (``picture``). Spans are recorded
at the loops and the trainer (``psdist.workers.traced``, ``psdist.servers.traced``).

Must not import servers, workers, transport or protocol. Needs neither MPI nor torch.
"""
