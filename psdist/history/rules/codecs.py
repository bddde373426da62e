"""Whether every push that was applied was coded as run.json says of its round.

Owns rule 10 of docs/history.md. Pure: reads the APPLY events, adds to the findings.

check_codecs(replay, findings)
"""

from __future__ import annotations

import numpy as np

from psdist.history.rules.findings import Findings, Rule
from psdist.history.rules.replay import ServerReplay


def check_codecs(replay: ServerReplay, findings: Findings) -> None:
    """The log names the codec of the message that brought an update; of an empty one none."""
    parts = replay.run.codecs
    if not parts:
        promised = np.zeros(replay.num_rows, np.int64)
    else:
        starts = np.asarray([each.round for each in parts], np.int64)
        codes = np.asarray([each.push_code for each in parts], np.int64)
        part = np.searchsorted(starts, replay.clock, side="right") - 1
        promised = codes[part]
        for number, each in enumerate(parts):
            if each.burst:
                number_of_round = replay.clock.astype(np.int64) + 1
                is_burst = (part == number) & (number_of_round % each.burst == 0)
                promised[is_burst] = each.burst_code
    promised[replay.is_empty] = 0
    findings.add_each(
        Rule.CODECS,
        np.flatnonzero(replay.codec != promised),
        lambda row: (
            f"{replay.line(row)}: came by codec {replay.codec[row]}; run.json says {promised[row]} "
            "of its round"
        ),
    )
