"""``python -m notbefore``."""

import sys

from notbefore.commands.main import main

sys.exit(main())
