"""``python -m tilesparse``: the same as the ``tilesparse`` command."""

import sys

from .cli import main

sys.exit(main())
