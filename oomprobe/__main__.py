"""``python -m oomprobe``."""

import sys

from oomprobe.cli import main

if __name__ == "__main__":
    sys.exit(main())
