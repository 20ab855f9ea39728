#!/bin/sh
# Installs the agent as a systemd service on this VM. Run it again after each upgrade, or with another configuration:
#
#   python3 -m venv /opt/notbefore && /opt/notbefore/bin/pip install '.[apprise]'
#   /opt/notbefore/share/notbefore/fleet/install.sh [--config FILE] [--no-start]
#   /opt/notbefore/share/notbefore/fleet/install.sh --uninstall [--purge]
#
# On a VM without a package index, use a bundle (`make bundle`). This installs the package into /opt/notbefore first:
#
#   install.sh --bundle notbefore-0.1.0-bundle.tar.gz [--config FILE] [--no-start]
#
# The script in an unpacked bundle needs no --bundle. PYTHON=python3.12 uses another Python than `python3`.
#
# --config FILE replaces the configuration; without it, an existing one stays. If the configuration is wrong or holds a
# secret, nothing changes. The check reads files as root; the service reports at its start which ones it cannot read.
# Each file in /etc/notbefore/credentials becomes a credential of the service: `url_credential: slack-url`.
# --uninstall removes the service, and keeps configuration, credentials and state; --purge removes these too.
# /usr/local gets links to the command and to its completions for bash, zsh and fish.
# DESTDIR is a prefix for every written path; then nothing is started.
set -eu
umask 022 # root's shell may have another one: every user may read these files, and only root may write them

here=$(cd "$(dirname "$0")" && pwd)
prefix=$(cd "$here/../../.." 2>/dev/null && pwd)
root="${DESTDIR:-}"
[ -x "$prefix/bin/notbefore" ] || prefix="$root/opt/notbefore" # the script of a bundle or a clone
etc="$root/etc/notbefore"
units="$root/etc/systemd/system"
shared="$root/usr/local"
links='bin/notbefore share/bash-completion/completions/notbefore share/zsh/site-functions/_notbefore
    share/fish/vendor_completions.d/notbefore.fish'
config=''
bundle=''
unpacked=''
start=yes
remove=''
purge=''
wrong=''
[ ! -d "$here/wheels" ] || bundle=$here

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

# replaces a text in standard input literally: sed would treat some characters as special
replace() {
    FROM=$1 TO=$2 awk '{
        rest = $0; line = ""
        while (at = index(rest, ENVIRON["FROM"])) {
            line = line substr(rest, 1, at - 1) ENVIRON["TO"]
            rest = substr(rest, at + length(ENVIRON["FROM"]))
        }
        print line rest
    }'
}

# installs the package offline, checks its hashes, and continues with the script of that version
install_bundle() {
    python=${PYTHON:-python3}
    "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "$python: Python 3.11 or later with venv is required (apt-get install python3-venv; another one: PYTHON=python3.12)"
    prefix="$root/opt/notbefore"
    if [ -f "$bundle" ]; then
        unpacked=$(mktemp -d)
        trap 'rm -rf "$unpacked"' EXIT
        tar -xzf "$bundle" -C "$unpacked" --strip-components=1 --no-same-owner || fail "$bundle: not a bundle of notbefore"
    fi
    wheels=${unpacked:-$bundle}
    [ -f "$wheels/requirements.txt" ] || fail "$bundle: not a bundle of notbefore: it has no requirements.txt"
    [ -x "$prefix/bin/python" ] || "$python" -m venv "$prefix"
    # --force-reinstall: otherwise pip keeps a package of the same version, even if the bundle has other content
    "$prefix/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --force-reinstall --no-index \
        --find-links "$wheels/wheels" --require-hashes --requirement "$wheels/requirements.txt" ||
        fail "$bundle: pip did not install it; nothing of the running service has changed"
    [ -z "$unpacked" ] || rm -rf "$unpacked"
    set --
    [ -z "$config" ] || set -- --config "$config"
    [ "$start" = yes ] || set -- "$@" --no-start
    exec "$prefix/share/notbefore/fleet/install.sh" "$@"
}

uninstall() {
    [ "$start" = no ] || systemctl disable --now --quiet notbefore.service || true # it may not exist any more
    rm -f "$units/notbefore.service" "$units/notbefore.service.d/credentials.conf"
    for name in $links; do
        [ "$(readlink "$shared/$name")" != "$prefix/$name" ] || rm -f "$shared/$name"
    done
    if [ -n "$purge" ]; then
        rm -rf "$etc" "$units/notbefore.service.d" "$root/var/lib/notbefore" "$root/var/lib/private/notbefore"
    else
        rmdir "$units/notbefore.service.d" 2>/dev/null || true # not empty: other drop-ins stay
        echo "kept: $etc and $root/var/lib/notbefore (--purge removes them)"
    fi
    [ "$start" = no ] || systemctl daemon-reload
    echo "the package itself is still in $prefix"
}

while [ $# -gt 0 ]; do
    case $1 in
        --config) [ $# -gt 1 ] || fail "--config: expected a file"; config=$2; shift ;;
        --bundle) [ $# -gt 1 ] || fail "--bundle: expected a file"; bundle=$2; shift ;;
        --no-start) start=no ;;
        --uninstall) remove=yes ;;
        --purge) purge=yes ;;
        *) fail "expected --bundle FILE, --config FILE, --no-start, --uninstall or --purge, got $1" ;;
    esac
    shift
done
[ -z "$purge" ] || [ -n "$remove" ] || fail "--purge requires --uninstall"
[ -z "$root" ] || start=no # these files are for another system
[ -n "$root" ] || [ "$(id -u)" = 0 ] || fail "run it as root"
if [ -n "$remove" ]; then
    uninstall
    exit 0
fi
[ -z "$bundle" ] || install_bundle
case $prefix in
    *[!A-Za-z0-9/._-]*) fail "$prefix: install it where the path has only letters, digits and / . _ -" ;;
esac
[ -x "$prefix/bin/notbefore" ] || fail "$prefix/bin/notbefore does not exist: install the package first, and run the script of that installation"

install -d -m 0755 "$etc" "$units/notbefore.service.d"
install -d -m 0700 "$etc/credentials"
[ -n "$config" ] || [ -e "$etc/notbefore.yml" ] || config="$prefix/share/notbefore/notbefore.yml"

# The check comes before any change of the running service. A new configuration is checked in its final directory,
# because its relative paths start there. Only root can read it until the check has found no secret.
checked="$etc/notbefore.yml"
new="$etc/.notbefore.yml"
if [ -n "$config" ]; then
    trap 'rm -f "$new"' EXIT
    trap 'exit 1' HUP INT TERM
    install -m 0600 "$config" "$new"
    checked=$new
fi
export CREDENTIALS_DIRECTORY="$etc/credentials" # the check reads the secrets too
messages=$("$prefix/bin/notbefore" check-config --strict "$checked" 2>&1 >/dev/null) || wrong=yes
[ -z "$messages" ] || echo "$messages" | replace "$new:" "$config:" | replace "$new" "$etc/notbefore.yml" >&2
[ -z "$wrong" ] || exit 1
[ -z "$config" ] || chmod 0644 "$new"

[ -z "$config" ] || mv "$new" "$etc/notbefore.yml"

replace /opt/notbefore/bin/notbefore "$prefix/bin/notbefore" \
    <"$prefix/share/notbefore/systemd/notbefore.service" | install -m 0644 /dev/stdin "$units/notbefore.service"
{
    echo '[Service]'
    for file in "$etc"/credentials/*; do
        [ ! -f "$file" ] || echo "LoadCredential=$(basename "$file"):/etc/notbefore/credentials/$(basename "$file")"
    done
} | install -m 0644 /dev/stdin "$units/notbefore.service.d/credentials.conf"
for name in $links; do
    if [ ! -e "$shared/$name" ]; then # another file of this name stays
        mkdir -p "$(dirname "$shared/$name")"
        ln -sfn "$prefix/$name" "$shared/$name"
    fi
done

if [ "$start" = yes ]; then
    systemctl daemon-reload
    systemctl enable --quiet notbefore.service
    systemctl restart notbefore.service # returns when it is ready
    "$prefix/bin/notbefore" health /etc/notbefore/notbefore.yml
    systemctl --no-pager --lines=0 status notbefore.service
    echo "To list events: notbefore events. To change sinks and routes: edit /etc/notbefore/notbefore.yml, and run this script again."
else
    echo "Installed, and not started: systemctl daemon-reload && systemctl enable --now notbefore.service"
fi
