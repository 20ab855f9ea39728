"""What an agent with nothing listed answers: for the servers of tests that have no agent behind them."""

from notbefore.core.listing import PendingView

NOTHING_PENDING = PendingView(incarnation=1, last_successful_poll=None, vm=None, unreadable=0, events=())
# the families that prometheus_client adds
PROCESS = tuple(f"process_{name}" for name in (
    "virtual_memory_bytes", "resident_memory_bytes", "start_time_seconds", "cpu_seconds", "open_fds", "max_fds",
))  # fmt: skip
