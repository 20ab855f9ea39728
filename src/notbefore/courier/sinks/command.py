"""An executable of the user's: the record as JSON on standard input and in ``NOTBEFORE_*`` variables; no shell.

Exit codes: 0 delivered, 75 (``EX_TEMPFAIL``) try again, anything else refused for good; ended by a signal: try again.
A command that was running when its courier ended is not run again.
"""

from typing import Final

from notbefore.config.messages import Messages
from notbefore.config.sinks import Command
from notbefore.courier.message import Message, Receipt
from notbefore.courier.message import Sink as BaseSink
from notbefore.courier.program import ending, run, variables
from notbefore.errors import SendError

EX_TEMPFAIL: Final = 75


class Sink(BaseSink):
    """A command."""

    def __init__(self, _name: str, settings: Command, _messages: Messages) -> None:
        self._command = list(settings.command)
        self._timeout = settings.timeout.seconds

    def send(self, message: Message) -> Receipt:
        """Run it to its end, or to the end of its time."""
        own = {
            "DELIVERY_ID": message.delivery_id,
            "CHANGE": message.kind,
            "SEVERITY": message.severity,
            "VM": message.content.vm_name or "",
        }
        code, output = run(self._command, message.line, variables(message.content.flat(), own), self._timeout)
        if code != 0:
            # a signal comes from outside: the machine goes down, or is out of memory
            raise SendError(ending(code, output), permanent=code > 0 and code != EX_TEMPFAIL)
        return Receipt()
