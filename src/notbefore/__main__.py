"""``notbefore`` and ``python -m notbefore``.

Until a command runs, and after it has ended, Ctrl-C ends the process at once and in silence: there
is nothing to clean up, and Python would print a traceback. So this comes before all other imports.
"""

import signal
import sys
from types import TracebackType

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _print_unless_interrupted(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print an exception that nothing has caught.

    Ctrl-C may come a second time, while the first one ends the command.
    """
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def main() -> int:
    """Run the command of the process; return its exit code."""
    sys.excepthook = _print_unless_interrupted
    from notbefore.commands import main as command_line  # noqa: PLC0415 - after the signal is set

    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
