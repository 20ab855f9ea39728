"""Fuzz what comes from outside with atheris: the document, IMDS's HTTP answers, the configurations, requests.

    tools/fuzz.py document imds config web_config listener           a minute each
    tools/fuzz.py config --seconds 3600 --keep                       an hour; the corpus keeps what reaches new code

What must hold stands in ``tests/support/fuzzed.py`` and ``fuzzed_listener.py``. The corpus is ``tests/corpus/NAME``; a
test runs it each time. A finding ends the run with an exit code other than 0, and its input is written to the current
directory. Needs atheris: ``pip install 'azure-notbefore[fuzz]'``.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
# an input that hangs is ended after a minute: on a busy machine one that is only waiting for the CPU takes seconds
SETTINGS: Final = ("-max_len=8192", "-timeout=60", "-rss_limit_mb=1024", "-print_final_stats=1")
INSTRUMENTED: Final = ("notbefore", "yaml", "waitress")
TARGETS: Final = ("document", "imds", "config", "web_config", "listener")


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="add to the corpus what reaches new code")
    parser.add_argument("--fuzz", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # libFuzzer's own words
    options = parser.parse_args()
    if options.fuzz is not None:
        fuzz(options.targets[0], options.fuzz)
    for target in options.targets:
        code = campaign(target, options.seconds, keep=options.keep)
        if code != 0:
            return code
    return 0


def campaign(target: str, seconds: int, *, keep: bool) -> int:
    """Fuzz one target, in a process of its own; returns the exit code."""
    corpus = ROOT / "tests/corpus" / target
    with tempfile.TemporaryDirectory() as place:
        found = Path(place)
        print(f"== {target}", flush=True)
        code = _run(target, *SETTINGS, f"-max_total_time={seconds}", str(found), str(corpus))
        if code == 0 and keep:
            code = _run(target, "-merge=1", str(corpus), str(found))
    return code


def _run(target: str, *words: str) -> int:
    return subprocess.run([*_command(target), *words], check=False).returncode


def _command(target: str) -> list[str]:
    return [sys.executable, __file__, target, "--fuzz"]


def fuzz(target: str, words: list[str]) -> None:
    """Fuzz with libFuzzer's own words; does not return."""
    sys.path.insert(0, str(ROOT / "tests"))
    import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]  # noqa: PLC0415 - only in this process

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from support.fuzzed import TARGETS as CHECKS  # noqa: PLC0415 - as above
        from support.fuzzed_listener import check as check_listener  # noqa: PLC0415 - as above

        check = CHECKS.get(target, check_listener)
        for path in (ROOT / "tests/corpus" / target).iterdir():
            check(path.read_bytes())  # what is imported on demand is instrumented as well

    # a merge has the shell run the first word again, with other words behind it
    atheris.Setup([shlex.join(_command(target)), *words], check)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
