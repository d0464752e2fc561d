"""``python -m flashlatte``: the command line."""

import sys

from flashlatte.cli import main

if __name__ == "__main__":
    sys.exit(main())
