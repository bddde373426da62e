"""``python -m psdist`` is ``psdist``."""

from psdist.commands.cli import main

if __name__ == "__main__":
    main()
