"""A Python without POSIX: what Windows lacks is taken away from it, in the agent and in the courier
that it starts.

First everything is imported as it is, so that other people's modules are there; then what only
POSIX has goes, and our own modules come anew. What stays: os.set_blocking, which the half of
waitress that is loaded here needs, and os.WNOHANG, with which subprocess waits here.
"""

import subprocess
import sys
from pathlib import Path

from support.agent import run

TAKE_AWAY = """
import ctypes, fcntl, functools, importlib, os, pkgutil, requests, runpy
import select, selectors, signal, socket, subprocess, sys, time, types
import notbefore

def import_all(names):
    return [importlib.import_module(name) for name in names]

LIGHT = [
    "commands.main", "commands.run", "courier.main", "courier.sinks.webhook", "wording.texts"
]
EVERYTHING = [module.name for module in pkgutil.walk_packages(notbefore.__path__, "notbefore.")]
names = EVERYTHING if everything else [f"notbefore.{name}" for name in LIGHT]
LEFT_OUT = ("__main__", "windows_event_log")  # the second needs pywin32, which only Windows has
names = [name for name in names if not name.endswith(LEFT_OUT)]
import_all(names)
ABSENT = ["fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"]
OS = '''EX_OK EX_TEMPFAIL O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK POSIX_SPAWN_DUP2 chown fchmod
fchown fork getegid geteuid getgid getloadavg getpgid getuid killpg lchown mkfifo nice openpty
pidfd_open posix_spawn posix_spawnp pread pwrite sched_getaffinity sched_yield setsid statvfs sync
uname wait3 wait4'''.split()
SIGNALS = '''SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1
SIGUSR2'''.split()

for name in [name for name in sys.modules if name.partition(".")[0] == "notbefore"]:
    del sys.modules[name]
# there it is of another family
socket.socketpair = functools.partial(socket.socketpair, socket.AF_UNIX)
subprocess.Popen.kill = lambda process: process.send_signal(9)  # as TerminateProcess does
subprocess.CREATE_NO_WINDOW = 0

def locking(descriptor, mode, length, *, _fcntl=fcntl):  # from where the file stands, as there
    offset = os.lseek(descriptor, 0, os.SEEK_CUR)
    _fcntl.lockf(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB, length, offset)

def share(end, _process):  # a copy, which the other process takes while it is there
    import threading
    copy = os.dup(end.fileno())
    threading.Timer(5.0, os.close, [copy]).start()
    return f"{os.getpid()} {copy}".encode()

def fromshare(line):
    call = ctypes.CDLL(None, use_errno=True).syscall
    process, number = map(int, line.split())
    opened = call(434, process, 0)  # pidfd_open
    taken = call(438, opened, number, 0)  # pidfd_getfd
    os.close(opened)
    return socket.socket(fileno=taken)

socket.socket.share, socket.fromshare = share, fromshare

for name in ABSENT:
    sys.modules[name] = None  # importing it raises ImportError
POLLS = [(select, ["epoll", "poll"]), (selectors, ["PollSelector"])]
for module, gone in ((os, OS), (signal, SIGNALS), *POLLS, (socket, ["AF_UNIX"])):
    for name in gone:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"
sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)

def open_key(_key, _path):  # of an empty registry
    raise FileNotFoundError

sys.modules["winreg"] = types.SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=open_key)

def milliseconds_since_boot():
    return int(time.monotonic() * 1000)

kernel32 = types.SimpleNamespace(GetTickCount64=milliseconds_since_boot)
ctypes.windll = types.SimpleNamespace(kernel32=kernel32)
import notbefore
"""
AS_PYTHON = """
sys.executable = sys.argv[0]  # what it starts is without POSIX, too
words = [word for word in sys.argv[1:] if word != "-P"]
assert words[0] == "-m", words
sys.argv = ["notbefore", *words[2:]]
runpy.run_module(words[1], run_name="__main__", alter_sys=True)
"""


def run_without_posix(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, with every module of ours imported."""
    return run(
        sys.executable, "-c", f"everything = True\n{TAKE_AWAY}\nimport_all(names)\n{script}", *words
    )


def python_without_posix(directory: Path) -> str:
    """An executable that takes ``[-P] -m MODULE ...`` as Python does.

    Modules beside it are found.
    """
    path = directory / "python-elsewhere"
    path.write_text(
        f"#!{sys.executable}\neverything = False\n{TAKE_AWAY}{AS_PYTHON}", encoding="utf-8"
    )
    path.chmod(0o755)
    return str(path)
