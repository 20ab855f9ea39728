"""Files of an instance's state: 0600 whatever the umask; a symbolic link in their place is not followed."""

import os
from typing import Final

NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)  # Windows has neither
PRIVATE: Final = 0o600


def private(path: str, flags: int) -> int:
    """Open a file, as the ``opener`` of ``open``; raises ``OSError``, also for a symbolic link."""
    descriptor = os.open(path, flags | NO_FOLLOW, PRIVATE)
    if flags & (os.O_WRONLY | os.O_RDWR) and hasattr(os, "fchmod"):
        os.fchmod(descriptor, PRIVATE)  # it may be there already, with another mode
    return descriptor
