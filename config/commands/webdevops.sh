#!/bin/sh
# For those who come from azure-scheduledevents-manager with `--drain.mode=command`: a `command` sink that runs your drain
# and uncordon commands with the variables that they know. docs/switching.md#drain-commands describes it.
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
EVENT_NOTBEFORE='' # as Azure writes it: a time in English, none once the event is started
if [ "$EVENT_STATUS" = Scheduled ] && [ -n "${NOTBEFORE_EVENT_NOT_BEFORE-}" ]; then
    EVENT_NOTBEFORE=$(LC_ALL=C date -u -d "$NOTBEFORE_EVENT_NOT_BEFORE" '+%a, %d %b %Y %H:%M:%S GMT')
fi
export EVENT_ID EVENT_SOURCE EVENT_STATUS EVENT_TYPE EVENT_RESOURCES EVENT_RESOURCETYPE EVENT_NOTBEFORE
[ "${NOTBEFORE_EVENT_RESOURCES+given}" ] || unset EVENT_RESOURCES # too long for a variable: the record on standard input has it

case $NOTBEFORE_CHANGE:${NOTBEFORE_EVENT_REASON-} in
    announced:* | started:first_seen_started) exec sh -c "$1" ;; # what had started when it was first seen was never announced
    canceled:* | finished:* | ended:*)
        # the manager gives this command no variables
        unset EVENT_ID EVENT_SOURCE EVENT_STATUS EVENT_TYPE EVENT_RESOURCES EVENT_RESOURCETYPE EVENT_NOTBEFORE
        exec sh -c "$2"
        ;;
esac
