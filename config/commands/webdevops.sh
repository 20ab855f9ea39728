#!/bin/sh
# A `command` sink that runs the drain and uncordon commands of azure-scheduledevents-manager (`--drain.mode=command`), with
# the same variables. See docs/switching.md#drain-commands.
#
#   sinks:
#     drain: {command: {command: [.../webdevops.sh, "DRAIN COMMAND", "UNCORDON COMMAND"], timeout: 5m}}
set -eu

[ $# -eq 2 ] || { echo "webdevops.sh: expected two commands: to drain, and to uncordon (it may be empty)" >&2; exit 64; }

EVENT_ID=$NOTBEFORE_EVENT_ID
EVENT_SOURCE=${NOTBEFORE_EVENT_SOURCE-}
EVENT_STATUS=$NOTBEFORE_EVENT_STATUS
EVENT_TYPE=$NOTBEFORE_EVENT_TYPE
EVENT_RESOURCES=$(echo "${NOTBEFORE_EVENT_RESOURCES-}" | tr , ' ')
EVENT_RESOURCETYPE=${NOTBEFORE_EVENT_RESOURCE_TYPE-}
EVENT_NOTBEFORE='' # in Azure's format; empty if the event has started
if [ "$EVENT_STATUS" = Scheduled ] && [ -n "${NOTBEFORE_EVENT_NOT_BEFORE-}" ]; then
    EVENT_NOTBEFORE=$(LC_ALL=C date -u -d "$NOTBEFORE_EVENT_NOT_BEFORE" '+%a, %d %b %Y %H:%M:%S GMT')
fi
export EVENT_ID EVENT_SOURCE EVENT_STATUS EVENT_TYPE EVENT_RESOURCES EVENT_RESOURCETYPE EVENT_NOTBEFORE
# a list that is too long for a variable is only in the record on standard input
[ "${NOTBEFORE_EVENT_RESOURCES+set}" ] || unset EVENT_RESOURCES

case $NOTBEFORE_CHANGE:${NOTBEFORE_EVENT_REASON-} in
    announced:* | started:first_seen_started) exec sh -c "$1" ;; # an event that starts at once is never announced
    canceled:* | finished:* | ended:*)
        # the manager gives this command no variables
        unset EVENT_ID EVENT_SOURCE EVENT_STATUS EVENT_TYPE EVENT_RESOURCES EVENT_RESOURCETYPE EVENT_NOTBEFORE
        exec sh -c "$2"
        ;;
esac
