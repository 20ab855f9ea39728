"""The commands. Thin: each reads its words and calls what does the work.

Exit codes: 0 done · 1 it failed while running (no agent answers, say) · 2 the command line or the configuration is
wrong · 3 it cannot start (address in use, state held by another agent).
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import notbefore
from notbefore.config.checks import Trial
from notbefore.config.load import dump, files, load, warnings
from notbefore.config.model import Config, default_state_dir
from notbefore.errors import ConfigError, ListenError, NotBeforeError, StoreError

OK: Final = 0
FAILED: Final = 1
WRONG: Final = 2
CANNOT_START: Final = 3

LATE: Final = {
    "simulate": "notbefore.commands.simulate",
    "demo": "notbefore.commands.demo",
    "drill": "notbefore.commands.drill",
    "outbox": "notbefore.commands.outbox",
    "approve": "notbefore.commands.approve",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        return _version(options)
    if options.command is None:
        parser.print_help()
        return WRONG
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except NotBeforeError as error:
        sys.stderr.write(f"notbefore: {error}\n")
        return _code(error)
    except BrokenPipeError:  # `notbefore history | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing may be flushed into the broken pipe
        return FAILED
    except KeyboardInterrupt:
        return FAILED


def _code(error: NotBeforeError) -> int:
    if isinstance(error, ConfigError):
        return WRONG
    return CANNOT_START if isinstance(error, (ListenError, StoreError)) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="notbefore", description=notbefore.__doc__, epilog=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("--version", action="store_true", help="say the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        # no abbreviations: --allow is not --allow-approval
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    run = add("run", _run, "watch the events of this VM and serve what is known of them")
    _with_configuration(run)
    run.add_argument(
        "--allow-approval", action="store_true", help="events may be approved, where approval.enabled says so as well"
    )
    check = add("check-config", _check_config, "read a configuration: what is wrong with it, or what it amounts to")
    _with_configuration(check)
    check.add_argument(
        "--connect", action="store_true", help="ask the sinks that can be asked: would they take a message?"
    )
    check.add_argument("--files", action="store_true", help="name the files that it has read besides, a line each")
    _with_configuration(add("discover", _discover, "look for IMDS, and say what was found where"))
    events = add("events", _events, "show what is listed now, as a running agent knows it")
    history = add("history", _history, "show the last changes")
    health = add("health", _health, "ask a running agent whether it is well: exit code 0 if so")
    for command in (events, history, health):
        _with_agent(command)
    for command in (events, history):
        command.add_argument("--json", action="store_true", help="JSON, one object a line")
    health.add_argument("--ready", action="store_true", help="and whether it sees what Azure says")
    history.add_argument("--state-dir", help="read this state directory instead of asking an agent")
    history.add_argument("--since", help="only changes from this time on (RFC 3339)")
    history.add_argument("--limit", type=int, default=100, help="at most so many, the newest (default 100)")
    _add_late(
        add("drill", _late, "send an exercise through the real routes and sinks, and say who was reached"), "drill"
    )
    _add_late(add("approve", _late, "let Azure start an event now, for all VMs that it affects"), "approve")
    _add_late(add("outbox", _late, "what waits to be delivered: list, show, retry, drop"), "outbox")
    _add_late(add("simulate", _late, "play IMDS, to try everything against"), "simulate")
    _add_late(add("demo", _late, "see events arrive, start and finish: a simulator and an agent, in fast time"), "demo")
    add("version", _version, "say the version")
    return parser


def _with_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="a YAML file; without one all defaults hold"
    )
    parser.add_argument("--listen", help="server.listen: where to serve, HOST:PORT")
    parser.add_argument("--imds", help="imds.endpoint: another IMDS, such as a simulator's address")
    parser.add_argument("--state-dir", help=f"state.dir: where the state is kept (default {default_state_dir()})")


def _with_agent(parser: argparse.ArgumentParser) -> None:
    """Where the agent is, and who asks."""
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG", help="the agent's configuration: it says where to ask"
    )
    parser.add_argument("--url", help="where to ask instead, http://HOST:PORT or https://HOST:PORT")
    parser.add_argument("--ca-file", help="who vouches for the agent's certificate (PEM)")
    parser.add_argument("--cert-file", help="the certificate to show the agent (PEM)")
    parser.add_argument("--key-file", help="its key, where it is not in the same file")
    parser.add_argument("--user", help="the name for an agent that wants a password")
    parser.add_argument("--password-file", help="a file that holds the password")


def _add_late(parser: argparse.ArgumentParser, name: str) -> None:
    """Take over the words of a command whose module only it needs: imported when it is asked for, not in the agent."""
    if name in sys.argv[1:2]:
        importlib.import_module(LATE[name]).add_arguments(parser)


def _load(options: argparse.Namespace, trial: Trial | None = None) -> Config:
    overrides = {"server.listen": options.listen, "imds.endpoint": options.imds, "state.dir": options.state_dir}
    return load(options.config, os.environ, overrides, trial=trial)


def _run(options: argparse.Namespace) -> int:
    from notbefore.agent.agent import Agent  # noqa: PLC0415 - only the agent pays for what it imports
    from notbefore.logs import set_up  # noqa: PLC0415 - as above

    config = _load(options)
    set_up(config.log.format, config.log.level)
    for text in warnings(config, options.config):
        logging.getLogger("notbefore.config").warning(text)
    return Agent(config, lambda: _load(options), allow_approval=options.allow_approval).run()


def _check_config(options: argparse.Namespace) -> int:
    from notbefore.delivery.sinks import try_out  # noqa: PLC0415 - as above
    from notbefore.imds.client import ImdsClient  # noqa: PLC0415 - as above
    from notbefore.logs import set_up  # noqa: PLC0415 - as above
    from notbefore.web.access import access, load_web_config  # noqa: PLC0415 - as above

    set_up("text", "critical")  # what a library says of an address may hold what is secret
    config = _load(options, None if options.connect else try_out)  # `connect` tries them one by one
    if options.files:
        web = config.server.web_config_file
        named = [*files(config), *(load_web_config(Path(web)).files if web else ())]
        sys.stdout.writelines(f"{path}\n" for path in named)
        return OK
    ImdsClient(config.imds.endpoint)  # says what is wrong with the address
    for text in [*warnings(config, options.config), *access(config.server).check_listen(config.server.listen)]:
        sys.stderr.write(f"notbefore: warning: {text}\n")
    if options.connect:
        from notbefore.commands.connect import connect  # noqa: PLC0415 - as above

        return connect(config, sys.stdout)
    sys.stdout.write(dump(config))
    return OK


def _discover(options: argparse.Namespace) -> int:
    from notbefore.imds.discovery import Discovery  # noqa: PLC0415 - as above

    imds = _load(options).imds
    for step in Discovery(imds.endpoint, imds.api_version).search():
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()  # the next one may take its time
        if step.answers:
            return OK
        if not imds.discover:
            sys.stdout.write("imds.discover is false: no other place is looked at\n")
            break
    return FAILED


def _events(options: argparse.Namespace) -> int:
    from notbefore.commands.client import agent_client  # noqa: PLC0415 - as above
    from notbefore.commands.tables import ask, show_events  # noqa: PLC0415 - as above

    show_events(ask(agent_client(options), "/api/v1/events"), sys.stdout, as_json=options.json)
    return OK


def _history(options: argparse.Namespace) -> int:
    from notbefore.commands.client import agent_client  # noqa: PLC0415 - as above
    from notbefore.commands.tables import read_changes, show_history  # noqa: PLC0415 - as above

    agent = agent_client(options) if options.state_dir is None else ""
    changes = read_changes(agent, options.state_dir, options.since, options.limit)
    show_history(changes, sys.stdout, as_json=options.json)
    return OK


def _health(options: argparse.Namespace) -> int:
    from notbefore.commands.client import agent_client  # noqa: PLC0415 - as above

    agent_client(options).ask("/readyz" if options.ready else "/healthz")
    sys.stdout.write("ok\n")
    return OK


def _late(options: argparse.Namespace) -> int:
    code: int = importlib.import_module(LATE[options.command]).run(options)
    return code


def _version(_options: argparse.Namespace) -> int:
    sys.stdout.write(f"notbefore {notbefore.__version__}\n")
    return OK
