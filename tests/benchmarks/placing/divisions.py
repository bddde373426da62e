"""How near to the best choice of servers a running job comes: random jobs against every way.

    python -m tests.benchmarks.placing.divisions [JOBS]

Each job (2 to 12 hosts, 1 to 3 ranks each, uneven racks and links, at most 5,000 ways) is planned
twice: as it is, where all ways are compared, and climbing, as where there are too many.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from unittest import mock

from psdist.topology.plan import serving_hosts
from tests.support.divisions import random_job

MOST_WAYS = 5000


def ratio(seconds: float, least_s: float) -> float:
    if least_s == 0:
        return 1.0 if seconds == 0 else math.inf
    return seconds / least_s


def main() -> None:
    num_jobs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    rng = random.Random(5)
    searched, climbed = [], []
    for _ in range(num_jobs):
        job = random_job(rng, most_ways=MOST_WAYS)
        least_s = job.least_s()
        searched.append(ratio(job.plan().cost_s, least_s))
        with mock.patch.object(serving_hosts, "MOST_WAYS", 0):
            climbed.append(ratio(job.plan().cost_s, least_s))
    for name, ratios in (("all ways", searched), ("climbing", climbed)):
        beyond = sum(each > 1.01 for each in ratios) / num_jobs
        print(
            f"{name}: {num_jobs} jobs, time over the best: mean {statistics.mean(ratios):.4f}, "
            f"max {max(ratios):.9f}; {100 * beyond:.1f} % are more than 1 % above"
        )


if __name__ == "__main__":
    main()
