"""What psdist changes within a run by itself: from what was observed to what is decided.

Lives here: when to change between sync and bounded staleness (``mode``), which bound staleness has
(``bound``), which codecs to send with (``codec``, with what an exchange is of a window of rounds in
``paces``, what it takes at each level in ``level_times``, and the rounds of groups that are in
different ones in ``own_window``), and how many local steps groups make (``steps`` by their speed,
``loss_steps`` by the loss); in ``kept`` what a checkpoint has of that. Pure: numbers in, decisions
out. The coordinator runs one of them, ``psdist check`` feeds it what was recorded and must get the
same decisions. It must not import anything of psdist but the modes' names.

    control = CodecControl(num_groups=4, names=["none", "fp16", "int8"])
    control.observe(Observation(group=0, first_round=1, own_us=[...], waits_us=[...]))
    decision = control.judge()                                # None, or what to change to
    control.committed(decision, 140)                          # it rules from round 140 on
"""
