"""One archive for VMs without a package index: the package, what it needs, and the hashes of all of it.

``python tools/bundle.py --extras apprise,web`` writes ``dist/notbefore-VERSION-bundle.tar.gz``: ``install.sh``,
``requirements.txt`` and ``wheels/`` for every supported Python and machine. It asks the index for what constraints.txt
pins; on the VM, ``install.sh --bundle FILE`` asks nobody. The same input gives the same bytes.
"""

import argparse
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PYTHONS: Final = ("3.11", "3.12", "3.13")
MACHINES: Final = ("x86_64", "aarch64")
GLIBC: Final = ("_2_17", "2014", "_2_28", "_2_34")  # the names of Linux's platforms: up to that of Debian 12
DOWNLOAD: Final = "download --quiet --no-deps --only-binary :all: --require-hashes --implementation cp"


def main() -> None:
    """Build the package, fetch the rest, and write the archive."""
    parser = argparse.ArgumentParser(description="write an archive that install.sh --bundle installs without a network")
    parser.add_argument("--extras", default="apprise,web", help="separated by commas (default: apprise,web)")
    parser.add_argument("--python", action="append", help=f"a version; may be repeated (default: {', '.join(PYTHONS)})")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="may be repeated (default: all)")
    parser.add_argument("--directory", type=Path, default=ROOT / "dist", help="where it is written (default: dist)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        wheels = place / "wheels"
        run("hatchling", "build", "--target", "wheel", "--directory", wheels)
        (own,) = wheels.glob("*.whl")
        version = own.name.split("-")[1]
        groups = ",".join(("agent", *filter(None, options.extras.split(","))))
        pins = run(ROOT / "tools" / "pins.py", "--for", groups)
        requirements = place / "requirements.txt"
        requirements.write_text(pins, encoding="utf-8")
        for python in options.python or PYTHONS:
            for machine in options.machine or MACHINES:
                words = [*DOWNLOAD.split(), "--python-version", python, "--requirement", requirements, "--dest", wheels]
                run("pip", *words, *(f"--platform=manylinux{glibc}_{machine}" for glibc in GLIBC))
        own_hash = hashlib.sha256(own.read_bytes()).hexdigest()
        requirements.write_text(f"{pins}azure-notbefore=={version} --hash=sha256:{own_hash}\n", encoding="utf-8")
        options.directory.mkdir(parents=True, exist_ok=True)
        archive = options.directory / f"notbefore-{version}-bundle.tar.gz"
        members = [*sorted(wheels.iterdir()), requirements]
        archive.write_bytes(packed(f"notbefore-{version}", place, members))
    sys.stdout.write(f"{hashlib.sha256(archive.read_bytes()).hexdigest()}  {archive}\n")


def run(tool: str | Path, *words: str | Path) -> str:
    """Run a module or script of this environment; returns what it printed. Ends the program where it fails."""
    command = [sys.executable, *(["-m", tool] if isinstance(tool, str) else [tool]), *words]
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{tool} failed:\n{done.stderr}")
    return done.stdout


def packed(top: str, place: Path, members: list[Path]) -> bytes:
    """The archive: these files and the installer below ``top``, without anything of this machine or this moment."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for path, name in [
            (ROOT / "config" / "fleet" / "install.sh", "install.sh"),
            *((member, member.relative_to(place).as_posix()) for member in members),
        ]:
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mode = path.stat().st_size, 0o755 if name == "install.sh" else 0o644
            with path.open("rb") as file:
                tar.addfile(info, file)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
