"""``python -m notbefore`` is the command ``notbefore``."""

import sys

from notbefore.commands.main import main

sys.exit(main())
