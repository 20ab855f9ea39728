"""constraints.txt: every package that an extra needs, at one version, with the hashes of its files;
and parts of it.

``python tools/pins.py`` writes it anew, with the versions that it has as far as pyproject.toml
still allows them; ``--upgrade`` takes the newest. uv (the extra ``release``) asks the index for all
platforms and Pythons. ``python tools/pins.py --for agent,apprise`` prints what an agent with this
extra needs, for ``pip install --require-hashes -r``; it needs neither uv nor a network.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PINS: Final = ROOT / "constraints.txt"
# above each package: the extras that need it, and `agent`, which is without any
NEEDED: Final = "# for: "
UV: Final = (
    "uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-header"
    " --no-annotate"
)


def main() -> None:
    """Write the file, or print a part of it."""
    parser = argparse.ArgumentParser(description="write constraints.txt, or print a part of it")
    parser.add_argument(
        "--for", dest="groups", metavar="GROUP,...", help="print these: agent, an extra"
    )
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    if options.groups:
        sys.stdout.write(part(PINS.read_text(encoding="utf-8"), set(options.groups.split(","))))
        return
    uv(
        "--all-extras",
        "--generate-hashes",
        "--output-file",
        PINS.name,
        *["--upgrade"] * options.upgrade,
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    words = {"agent": (), **{extra: ("--extra", extra) for extra in extras}}
    needed = {
        group: set(names(uv(*more, "--constraint", PINS.name))) for group, more in words.items()
    }
    blocks = re.split(r"(?m)^(?=[\w.-]+==)", PINS.read_text(encoding="utf-8"))[1:]
    heads = (
        " ".join(group for group in needed if names(block)[0] in needed[group]) for block in blocks
    )
    PINS.write_text(
        "".join(f"{NEEDED}{head}\n{block}" for head, block in zip(heads, blocks, strict=True)),
        "utf-8",
    )


def part(text: str, groups: set[str]) -> str:
    """The packages that one of the groups needs, with their hashes.

    Raises ``SystemExit`` for an unknown group.
    """
    blocks = [block.partition("\n") for block in text.split(NEEDED)[1:]]
    known = {group for needed, _, _ in blocks for group in needed.split()}
    if unknown := groups - known:
        raise SystemExit(
            f"there is nothing for {', '.join(sorted(unknown))}: known are"
            f" {', '.join(sorted(known))}"
        )
    return "".join(package for needed, _, package in blocks if groups & set(needed.split()))


def names(text: str) -> list[str]:
    """The packages of a compiled text."""
    return re.findall(r"(?m)^([\w.-]+)==", text)


def uv(*words: str) -> str:
    """Compile; returns what it prints. On standard error it says what does not fit."""
    command = [
        sys.executable,
        "-m",
        *UV.split(),
        "--no-emit-index-url",
        "--no-emit-find-links",
        *words,
    ]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout


if __name__ == "__main__":
    main()
