"""``python -m notbefore``."""

import sys

from notbefore.cli import main

sys.exit(main())
