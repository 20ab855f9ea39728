"""What an agent with nothing listed answers: for the servers of tests that have no agent behind them."""

from notbefore.core.listing import PendingView

NOTHING_PENDING = PendingView(incarnation=1, last_successful_poll=None, vm=None, unreadable=0, events=())
