"""``psdist`` with a rank that is killed at a named moment: tests/support/strikes.py says which.

STRIKE="applying server" PSDIST_RUN_DIR=DIR python -m tests.support.programs.deaths.struck run ...
"""

from __future__ import annotations

from psdist.commands.cli import main
from tests.support.strikes import Strike, install

if __name__ == "__main__":
    if strike := Strike.of_environment():
        install(strike)
    main()
