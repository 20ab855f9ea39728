"""A Python without POSIX, to run the agent and its courier as if on Windows.

The script first imports everything with POSIX, so that the modules of other packages are loaded. It
then removes the names that only POSIX has, and imports notbefore's own modules again.

Two names stay although Windows lacks them: os.set_blocking, because waitress was loaded as on
POSIX, and os.WNOHANG, with which subprocess waits here.
"""

import subprocess
import sys
from pathlib import Path

from support.agent import run

REMOVE_POSIX = """
import ctypes, fcntl, functools, importlib, os, pkgutil, requests, runpy
import select, selectors, signal, socket, subprocess, sys, threading, time, types
import notbefore

# ---- import everything with POSIX

def import_all(names):
    return [importlib.import_module(name) for name in names]

COMMON_MODULES = [
    "notbefore.commands.main",
    "notbefore.commands.run",
    "notbefore.courier.main",
    "notbefore.courier.sinks.webhook",
    "notbefore.wording.texts",
]
EXCLUDED = ("__main__", "windows_event_log")  # the second needs pywin32, which only Windows has
if imports_everything:
    modules = pkgutil.walk_packages(notbefore.__path__, "notbefore.")
    names = [module.name for module in modules if not module.name.endswith(EXCLUDED)]
else:
    names = COMMON_MODULES
import_all(names)

# ---- remove the names that only POSIX has

ABSENT_MODULES = '''fcntl grp pty pwd readline resource syslog termios tty'''.split()
ABSENT_IN_OS = '''EX_OK EX_TEMPFAIL O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK POSIX_SPAWN_DUP2
chown fchmod fchown fork getegid geteuid getgid getloadavg getpgid getuid killpg lchown mkfifo nice
openpty pidfd_open posix_spawn posix_spawnp pread pwrite sched_getaffinity sched_yield setsid
statvfs sync uname wait3 wait4'''.split()
ABSENT_IN_SIGNAL = '''SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1
SIGUSR2'''.split()
ABSENT_NAMES = (
    (os, ABSENT_IN_OS),
    (signal, ABSENT_IN_SIGNAL),
    (select, ["epoll", "poll"]),
    (selectors, ["PollSelector"]),
    (socket, ["AF_UNIX"]),
)

POSIX_SOCKET = socket.AF_UNIX  # for this script

# Windows has socketpair, of another family
socket.socketpair = functools.partial(socket.socketpair, POSIX_SOCKET)

for name in ABSENT_MODULES:
    sys.modules[name] = None  # so that an import raises ImportError
for module, absent_names in ABSENT_NAMES:
    for name in absent_names:
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "win32"

# ---- add the names that only Windows has

def kill(process):  # the signal is SIGKILL; Windows calls TerminateProcess
    process.send_signal(9)

subprocess.Popen.kill = kill
subprocess.CREATE_NO_WINDOW = 0

def locking(descriptor, mode, length, *, _fcntl=fcntl):  # from the current position of the file
    offset = os.lseek(descriptor, 0, os.SEEK_CUR)
    _fcntl.lockf(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB, length, offset)

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)

def share(end, _process):  # another process takes the socket over a socket of POSIX
    listener = socket.socket(POSIX_SOCKET)
    listener.bind("")  # the kernel chooses an address
    listener.listen()
    listener.settimeout(60)  # the other process may die before it takes the socket
    copy = end.dup()
    threading.Thread(target=hand_over, args=(listener, copy), daemon=True).start()
    return listener.getsockname()

def hand_over(listener, copy):
    with listener, copy:
        taker, _ = listener.accept()
        with taker:
            socket.send_fds(taker, [b"socket"], [copy.fileno()])

def fromshare(address):
    with socket.socket(POSIX_SOCKET) as giver:
        giver.connect(address)
        _, (descriptor,), _, _ = socket.recv_fds(giver, 16, 1)
    return socket.socket(fileno=descriptor)

socket.socket.share = share
socket.fromshare = fromshare

def open_key(_key, _path):  # of an empty registry
    raise FileNotFoundError

sys.modules["winreg"] = types.SimpleNamespace(HKEY_LOCAL_MACHINE=0, OpenKey=open_key)

def milliseconds_since_boot():
    return int(time.monotonic() * 1000)

kernel32 = types.SimpleNamespace(GetTickCount64=milliseconds_since_boot)
ctypes.windll = types.SimpleNamespace(kernel32=kernel32)

# ---- import notbefore again, without POSIX

for name in list(sys.modules):
    if name.partition(".")[0] == "notbefore":
        del sys.modules[name]
import notbefore
"""
RUN_MODULE = """
sys.executable = sys.argv[0]  # processes that it starts run without POSIX too
words = [word for word in sys.argv[1:] if word != "-P"]
assert words[0] == "-m", words
sys.argv = ["notbefore", *words[2:]]
runpy.run_module(words[1], run_name="__main__", alter_sys=True)
"""


def run_without_posix(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script until it exits, with every module of notbefore imported."""
    whole_script = f"imports_everything = True\n{REMOVE_POSIX}\nimport_all(names)\n{script}"
    return run(sys.executable, "-c", whole_script, *words)


def python_without_posix(directory: Path) -> str:
    """Write an executable that runs ``[-P] -m MODULE ...`` as Python does, and return its path.

    It also finds modules in ``directory``.
    """
    path = directory / "python-without-posix"
    path.write_text(
        f"#!{sys.executable}\nimports_everything = False\n{REMOVE_POSIX}{RUN_MODULE}",
        encoding="utf-8",
    )
    path.chmod(0o755)
    return str(path)
