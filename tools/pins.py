"""constraints.txt: every package that an extra needs, at one version, with the hashes of its files; and parts of it.

``python tools/pins.py`` writes it anew, with the versions that it has as far as pyproject.toml still allows them;
``--upgrade`` takes the newest. That asks the index, through uv (the extra ``release``), which gives the hashes for all
platforms and Pythons. ``python tools/pins.py --for agent,apprise`` prints what an agent with this extra needs, for
``pip install --require-hashes -r``; it needs neither uv nor a network.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PINS: Final = ROOT / "constraints.txt"
AGENT, BUILD = "agent", "build"  # groups beside the extras: what it needs without any, and what builds the package
HEAD: Final = "# Made by tools/pins.py. Above each package stands what needs it."
NEEDED: Final = "# for: "


def main() -> None:
    """Write the file, or print a part of it."""
    parser = argparse.ArgumentParser(description="write constraints.txt, or print a part of it")
    parser.add_argument("--for", dest="groups", metavar="GROUP,...", help=f"print these: {AGENT}, {BUILD}, an extra")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    if options.groups:
        sys.stdout.write(part(PINS.read_text(encoding="utf-8"), set(options.groups.split(","))))
        return
    known = "" if options.upgrade else without_hashes(PINS.read_text(encoding="utf-8"))
    PINS.write_text(pinned(requirements(), known), encoding="utf-8")


def part(text: str, groups: set[str]) -> str:
    """The packages that one of the groups needs, with their hashes; raises ``SystemExit`` for an unknown group."""
    blocks = re.split(rf"(?m)^{NEEDED}", text)[1:]
    known = {group for block in blocks for group in block.partition("\n")[0].split()}
    if unknown := groups - known:
        raise SystemExit(f"there is nothing for {', '.join(sorted(unknown))}: known are {', '.join(sorted(known))}")
    found = (block.partition("\n") for block in blocks)
    return "".join(package for needed, _, package in found if groups & set(needed.split()))


def without_hashes(text: str) -> str:
    """The versions alone, one a line."""
    return "".join(f"{line}\n" for line in re.findall(r"(?m)^([\w.-]+==[^\s;\\]+)", text))


def requirements() -> dict[str, list[str]]:
    """What each group asks for, as pyproject.toml says it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)
    base, extras = project["project"]["dependencies"], project["project"]["optional-dependencies"]

    def asked(name: str) -> list[str]:
        found = []
        for line in extras[name]:
            inner = re.fullmatch(rf"{re.escape(project['project']['name'])}\[(.+)\]", line)
            found += [one for part in inner[1].split(",") for one in asked(part)] if inner else [line]
        return found

    build = [*project["build-system"]["requires"], "editables>=0.5"]  # hatchling asks for it with `--editable`
    return {AGENT: base, BUILD: build, **{name: asked(name) for name in extras}}


def pinned(groups: dict[str, list[str]], known: str) -> str:
    """The file: all groups together decide the versions, and each by itself says what it needs of them."""
    whole = compiled([line for lines in groups.values() for line in lines], known, "--generate-hashes")
    versions = without_hashes(whole)
    needed = {group: set(names(compiled(lines, versions))) for group, lines in groups.items()}
    parts = [HEAD + "\n"]
    for block in re.findall(r"(?m)^[\w.-]+==.*\n(?: .*\n)*", whole):
        (name,) = names(block)
        parts.append(f"{NEEDED}{' '.join(group for group in groups if name in needed[group])}\n{block}")
    return "".join(parts)


def names(text: str) -> list[str]:
    """The packages of a compiled text."""
    return re.findall(r"(?m)^([\w.-]+)==", text)


def compiled(lines: list[str], known: str, *words: str) -> str:
    """The versions that fit, those that are known before others; by uv, for every Python and platform."""
    with tempfile.TemporaryDirectory() as directory:
        asked, output = Path(directory) / "asked.in", Path(directory) / "output.txt"
        asked.write_text("\n".join(lines), encoding="utf-8")
        output.write_text(known, encoding="utf-8")  # what stands there is preferred
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--no-header"]
        command += ["--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--output-file", str(output)]
        subprocess.run(
            [sys.executable, "-m", *command, *words, str(asked)], check=True, stdout=subprocess.DEVNULL
        )  # uv says on standard error what does not fit
        return output.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
