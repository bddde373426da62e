"""``python -m psdist`` is ``psdist``."""

from psdist.cli import main

if __name__ == "__main__":
    main()
