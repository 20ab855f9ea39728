"""Nothing of the agent needs POSIX: what Windows lacks is taken away from a Python, and the agent runs in it."""

import json
import subprocess
import sys
from pathlib import Path

from notbefore.simulator.server import Simulator
from support.agent import free_port
from support.azure import body, item
from support.peers import HttpPeer

# first everything is imported as it is, so that other people's modules are there; then what only POSIX has goes, and
# our own modules come anew (os.set_blocking stays: the half of waitress that is loaded here needs it)
TAKE_AWAY = """
import functools, importlib, os, pkgutil, select, signal, socket, subprocess, sys, types
import notbefore

def everything():
    names = [m.name for m in pkgutil.walk_packages(notbefore.__path__, "notbefore.") if not m.name.endswith("__main__")]
    return [importlib.import_module(name) for name in names]

imported = len(everything())
ABSENT = ["fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"]
OS = '''EX_OK EX_TEMPFAIL O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK POSIX_SPAWN_DUP2 WNOHANG chown fchmod fchown fork
getegid geteuid getgid getloadavg getpgid getuid killpg lchown mkfifo nice openpty pidfd_open posix_spawn posix_spawnp
pread pwrite sched_getaffinity sched_yield setsid statvfs sync uname wait3 wait4'''.split()
SIGNALS = "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2".split()

for name in [name for name in sys.modules if name.partition(".")[0] == "notbefore"]:
    del sys.modules[name]
socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)  # there it is of another family
for name in ABSENT:
    sys.modules[name] = None  # importing it raises ImportError
for module, names in ((os, OS), (signal, SIGNALS), (select, ["epoll", "poll"]), (socket, ["AF_UNIX"])):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
subprocess.Popen.kill = subprocess.Popen.terminate  # there they are the same
sys.platform = "win32"
sys.modules["msvcrt"] = types.SimpleNamespace(locking=lambda *_: None, LK_NBLCK=2)
import notbefore
assert len(everything()) == imported > 40
"""
CHECK = """
from notbefore.cli import main
sys.exit(main(sys.argv[1:]))
"""
RUN = """
import _thread, threading, time
from notbefore.cli import main
from notbefore.errors import NotBeforeError
from notbefore.show import ask

def end():
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            ask("http://" + sys.argv[-1], "/readyz")
            print("ready")
            break
        except NotBeforeError:
            time.sleep(0.05)
    signal.raise_signal(signal.SIGINT)  # as a service's wrapper does: Ctrl-C

threading.Thread(target=end, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""


def without_posix(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", TAKE_AWAY + script, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_module_is_imported_where_posix_is_not() -> None:
    told = without_posix(CHECK, "check-config")
    assert (told.returncode, told.stderr) == (0, "")
    assert "ProgramData" in told.stdout


def test_the_agent_watches_serves_and_stops_where_posix_is_not(tmp_path: Path) -> None:
    with Simulator() as imds:
        imds.set_document(body())
        words = ("--imds", imds.endpoint, "--state-dir", str(tmp_path), "--listen", f"127.0.0.1:{free_port()}")
        told = without_posix(RUN, "run", *words)
    assert told.returncode == 0, told.stderr
    assert "ready" in told.stdout
    assert "Traceback" not in told.stderr


def test_it_delivers_where_posix_is_not(tmp_path: Path) -> None:
    """The agent's half of it: the courier that it starts is a Python of this system."""
    with Simulator() as imds, HttpPeer() as peer:
        imds.set_document(body(item(NotBefore="Fri, 01 Mar 2058 12:00:00 GMT")))
        config = tmp_path / "notbefore.yml"
        hook = {"url": f"{peer.url}/hook", "allow_private": True}
        config.write_text(json.dumps({"sinks": {"hook": {"webhook": hook}}}), encoding="utf-8")
        listen = f"127.0.0.1:{free_port()}"
        words = ("--imds", imds.endpoint, "--state-dir", str(tmp_path / "state"), "--listen", listen)
        told = without_posix(RUN, "run", str(config), *words)
    assert told.returncode == 0, told.stderr
    assert "Traceback" not in told.stderr
    (request,) = peer.requests
    assert json.loads(request.body)["azure.scheduled_event.change"] == "announced"
