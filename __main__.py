"""`python -m penstock`: the `penstock` command."""

import sys

from .launcher.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
