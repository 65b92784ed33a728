"""`python -m penstock.launcher` is the `penstock` command."""

import sys

from .cli import main

sys.exit(main())
