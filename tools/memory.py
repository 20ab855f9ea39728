"""What an agent has in memory, by module: ``tools/memory.py [--seconds 3600]``.

First import by import, in a process of its own: how much larger each one of the agent's modules, and each package that
it needs, made the process (KiB, what came with it included). Then an agent at a simulator that lists, starts and ends
events one after the other: its size each minute, for so many seconds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from notbefore.simulator.server import Simulator

SMALLEST: Final = 100  # KiB; smaller ones are left out
EVERY: Final = 60.0  # seconds
BY_IMPORT: Final = """
import builtins, sys
from pathlib import Path
def size():
    return int(Path("/proc/self/smaps_rollup").read_text().split("Rss:")[1].split()[0])
real, depth, rows = builtins.__import__, 0, []
def watched(name, globals=None, locals=None, fromlist=(), level=0):
    global depth
    before, known = size() if not level else 0, len(sys.modules)
    depth += 1
    try:
        return real(name, globals, locals, fromlist, level)
    finally:
        depth -= 1
        if not level and len(sys.modules) > known:
            rows.append((depth, name, size() - before))
builtins.__import__ = watched
import notbefore.commands.run
builtins.__import__ = real
for depth, name, grown in rows:
    print(depth, name, grown)
print(0, "all", size())
"""


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.0, help="how long an agent is watched with events; 0: not")
    seconds = parser.parse_args().seconds
    output = subprocess.run([sys.executable, "-c", BY_IMPORT], capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        depth, name, grown = line.split()
        if int(grown) >= SMALLEST:
            print(f"{int(grown):8,} KiB {'  ' * int(depth)}{name}")
    if seconds:
        watch(seconds)


def watch(seconds: float) -> None:
    """Print the size of an agent that sees one event after the other."""
    with tempfile.TemporaryDirectory() as state, Simulator() as simulator:
        words = ("run", "--imds", simulator.endpoint, "--listen", "127.0.0.1:0", "--state-dir", state)
        agent = subprocess.Popen([sys.executable, "-m", "notbefore", *words], stdout=subprocess.DEVNULL)
        try:
            end, number = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                simulator.clear()
                simulator.start("live-migration", event_id=f"memory-{number}")
                number += 1
                time.sleep(min(EVERY, max(0.0, end - time.monotonic())))
                rollup = Path(f"/proc/{agent.pid}/smaps_rollup").read_text(encoding="ascii")
                sizes = {name: rollup.split(f"\n{name}:")[1].split()[0] for name in ("Rss", "Pss", "Anonymous")}
                print(f"after {number} events:", ", ".join(f"{name} {kib} KiB" for name, kib in sizes.items()))
        finally:
            agent.terminate()
            agent.wait(10)


if __name__ == "__main__":
    main()
