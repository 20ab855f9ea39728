#!/bin/sh
# Makes one archive for VMs without a package index: install.sh, requirements.txt with hashes, and wheels/ for every
# supported Python and machine. `install.sh --bundle FILE` needs no network. The same input gives the same bytes.
# Usage: tools/bundle.sh [DIRECTORY]
# Environment: EXTRAS, PYTHONS, MACHINES; BIN is the directory of the programs of Python.
set -eu
cd "$(dirname "$0")/.."
out=${1:-dist}
python=${BIN:+$BIN/}python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m hatchling build --target wheel --directory "$work/wheels" >/dev/null
wheel=$(basename "$work"/wheels/*.whl)
version=$(echo "$wheel" | cut -d- -f2)
"$python" tools/pins.py --for "agent${EXTRAS:+,$EXTRAS}" >"$work/requirements.txt"
for python_version in ${PYTHONS:-3.11 3.12 3.13}; do
    for machine in ${MACHINES:-x86_64 aarch64}; do
        # the platforms up to the glibc of Debian 12
        "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
            --implementation cp --python-version "$python_version" --platform "manylinux_2_17_$machine" \
            --platform "manylinux2014_$machine" --platform "manylinux_2_28_$machine" \
            --platform "manylinux_2_34_$machine" --requirement "$work/requirements.txt" --dest "$work/wheels"
    done
done
hash=$(sha256sum "$work/wheels/$wheel" | cut -d' ' -f1)
echo "azure-notbefore==$version --hash=sha256:$hash" >>"$work/requirements.txt"
install -m 755 config/fleet/install.sh "$work/install.sh"
mkdir -p "$out"
(cd "$work" && find . -type f | LC_ALL=C sort | tar --create --files-from=- --mtime=@0 --owner=0 --group=0 --numeric-owner \
    --mode=u=rwX,go=rX --transform="s,^\.,notbefore-$version,") | gzip --no-name >"$out/notbefore-$version-bundle.tar.gz"
sha256sum "$out/notbefore-$version-bundle.tar.gz"
