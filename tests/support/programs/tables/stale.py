"""As clicks, in any mode: without the table whose optimizer needs sync. ``stale.py RESULT``.

psdist run --workers 2 --mode ssp -m tests.support.programs.tables.stale /tmp/result.pt
"""

from __future__ import annotations

import sys

from tests.support.programs.tables import clicks

if __name__ == "__main__":
    del clicks.OPTIMIZERS["ftrl"]
    clicks.main(sys.argv[1])
