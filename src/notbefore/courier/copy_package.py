"""Writes this package to standard output, as a ZIP file that Python imports from.

The agent runs it once, at its start, as a process of its own: ``zipfile`` would cost the agent a megabyte for good.
"""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Write all modules, and the files that they read."""
    with zipfile.ZipFile(sys.stdout.buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in sorted(ROOT.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path, path.relative_to(ROOT.parent))


if __name__ == "__main__":
    main()
