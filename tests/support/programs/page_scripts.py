"""Run the scripts of these pages one after the other, each as a job of the same ranks.

psdist run -n 2 tests/support/programs/page_scripts.py docs/tutorials/from-ddp.md ...
"""

from __future__ import annotations

import sys
from typing import Any

from tests.support.pages import whole_scripts

for page in sys.argv[1:]:
    for script in whole_scripts(page):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(script, page, "exec"), names)  # a script that a page of docs/ shows
        print(f"{page}: clock {names['job'].clock}")
        names["job"].close()
