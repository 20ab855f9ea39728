#!/bin/sh
# Sets the agent up as a service of systemd on this VM; run it again after each upgrade, or with another configuration:
#
#   python3 -m venv /opt/notbefore && /opt/notbefore/bin/pip install '.[apprise]'
#   /opt/notbefore/share/notbefore/fleet/install.sh [--config FILE] [--no-start]
#
# A configuration that is there stays unless --config gives another; one that is wrong, or names what the service cannot
# read, changes nothing. Each file of /etc/notbefore/credentials becomes a credential of the service:
# `url_credential: slack-url`. DESTDIR is put before every path that is written to, and nothing is started then.
set -eu

prefix=$(cd "$(dirname "$0")/../../.." && pwd)
etc="${DESTDIR:-}/etc/notbefore"
units="${DESTDIR:-}/etc/systemd/system"
config='' start=yes wrong=''

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

while [ $# -gt 0 ]; do
    case $1 in
        --config) [ $# -gt 1 ] || fail "--config: expected a file"; config=$2; shift ;;
        --no-start) start=no ;;
        *) fail "expected --config FILE or --no-start, got $1" ;;
    esac
    shift
done
[ -z "${DESTDIR:-}" ] || start=no # what is written there is for another system
[ -x "$prefix/bin/notbefore" ] || fail "$prefix/bin/notbefore is not there: install the package first, run the script out of it"
[ -n "${DESTDIR:-}" ] || [ "$(id -u)" = 0 ] || fail "run it as root"

install -d -m 0755 "$etc" "$units/notbefore.service.d"
install -d -m 0700 "$etc/credentials"
[ -n "$config" ] || [ -e "$etc/notbefore.yml" ] || config="$prefix/share/notbefore/notbefore.yml"

# What is wrong is said before anything of the running service is touched. A new configuration is read where it will lie:
# what it names is looked for beside it.
checked="$etc/notbefore.yml" new="$etc/.notbefore.yml"
if [ -n "$config" ]; then
    trap 'rm -f "$new"' EXIT
    trap 'exit 1' HUP INT TERM
    install -m 0644 "$config" "$new"
    checked=$new
fi
export CREDENTIALS_DIRECTORY="$etc/credentials" # it is read with its secrets
said=$("$prefix/bin/notbefore" check-config "$checked" 2>&1 >/dev/null) || wrong=yes
[ -z "$said" ] || echo "$said" | sed -e "s#$new:#$config:#" -e "s#$new#$etc/notbefore.yml#" >&2
[ -z "$wrong" ] || exit 1

# root can read it all, the service is a user of its own, in the groups that a drop-in gives it
groups=$(cat "$units"/notbefore.service.d/*.conf 2>/dev/null | sed -n 's/^SupplementaryGroups= *//p' | tr -s ' \n' ,)
as_service() {
    user=65533 # nobody's: neither systemd nor a distribution gives it away
    if [ -n "${groups%,}" ]; then set -- --groups="${groups%,}" "$@"; else set -- --clear-groups "$@"; fi
    setpriv --reuid=$user --regid=$user "$@"
}
if ! as_service test -x "${DESTDIR:-/}" 2>/dev/null; then # no root, no such group here, or a directory of ours alone
    echo "install.sh: whether the service's user can read its files was not checked" >&2
else
    { echo "$checked"; "$prefix/bin/notbefore" check-config --files "$checked"; } | while IFS= read -r named; do
        as_service test -r "$named" || fail "$named: the service's user cannot read it: for a secret use *_credential" \
            "instead of *_file, else give it to a group of the service: docs/access.md"
    done
fi
[ -z "$config" ] || mv "$new" "$etc/notbefore.yml"

sed "s#/opt/notbefore/#$prefix/#" "$prefix/share/notbefore/systemd/notbefore.service" >"$units/notbefore.service"
{
    echo '[Service]'
    for file in "$etc"/credentials/*; do
        [ ! -f "$file" ] || echo "LoadCredential=$(basename "$file"):/etc/notbefore/credentials/$(basename "$file")"
    done
} >"$units/notbefore.service.d/credentials.conf"

if [ "$start" = yes ]; then
    systemctl daemon-reload
    systemctl enable --quiet notbefore.service
    systemctl restart notbefore.service # returns when it is ready
    "$prefix/bin/notbefore" health /etc/notbefore/notbefore.yml
    systemctl --no-pager --lines=0 status notbefore.service
fi
