"""Fuzz the listener's requests with atheris: ``tools/fuzz_listener.py [--seconds 60] [--keep]``.

The bytes go through the agent's own parser, access control and application (``tests/support/fuzzed_listener.py``),
which must answer each request well-formed and with an expected status, and give nothing away without a password. It
starts from the kept corpus; ``--keep`` adds what reaches new code. A finding ends the run with an exit code other than
0, and its input is written to the current directory. Needs ``pip install 'azure-notbefore[fuzz]'``.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
CORPUS: Final = ROOT / "tests/corpus/listener"
# what requests are made of, for libFuzzer's dictionary
WORDS: Final = (
    "GET ", "HEAD ", "POST ", " HTTP/1.1", " HTTP/1.0", "\r\n", "\r\n\r\n", "Host: ", "localhost", "Connection: ",
    "close", "keep-alive", "Content-Length: ", "Transfer-Encoding: ", "chunked", "Expect: ", "100-continue",
    "Authorization: Basic ", "Accept: ", "application/openmetrics-text", "Accept-Encoding: gzip", "/metrics",
    "/healthz", "/api/v1/history?since=", "limit=", "http://", "//", "%2f", "\0\0\0",
)  # fmt: skip


def main() -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--keep", action="store_true", help="add to the corpus what reaches new code")
    parser.add_argument("--fuzz", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # libFuzzer's own words
    options = parser.parse_args()
    if options.fuzz is not None:
        fuzz(options.fuzz)
        return 0
    with tempfile.TemporaryDirectory() as place:
        found, words = Path(place, "found"), Path(place, "words")
        found.mkdir()
        words.write_text("".join(f'"{"".join(map(escaped, word))}"\n' for word in WORDS), encoding="ascii")
        settings = [f"-max_total_time={options.seconds}", "-max_len=4096", "-timeout=5", f"-dict={words}"]
        code = run(*settings, "-print_final_stats=1", found, CORPUS)
        if code == 0 and options.keep:
            code = run("-merge=1", CORPUS, found)
    return code


def escaped(character: str) -> str:
    """As libFuzzer reads it."""
    return f"\\x{ord(character):02x}"


def run(*words: str | Path) -> int:
    """Run this file with libFuzzer's words: it ends its process."""
    return subprocess.run([sys.executable, __file__, "--fuzz", *map(str, words)], check=False).returncode


def fuzz(words: list[str]) -> None:
    """Fuzz, with libFuzzer's own words; does not return."""
    sys.path.insert(0, str(ROOT / "tests"))
    import atheris  # noqa: PLC0415 - only in this process

    with atheris.instrument_imports(include=["waitress", "notbefore.web"]):
        from support.fuzzed_listener import check  # noqa: PLC0415 - as above

    def one(data: bytes) -> Any:
        check(data)

    atheris.Setup([sys.argv[0], *words], one)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
