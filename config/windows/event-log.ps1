# Each change as an entry of Windows' event log, from where Log Analytics takes it: run every minute by a scheduled task,
# as the user who owns C:\ProgramData\notbefore. It asks the agent for what changed since it last asked.
#Requires -Version 5.1
#Requires -PSEdition Desktop
param(
    [string] $Url = 'http://127.0.0.1:10169',
    [string] $Bookmark = 'C:\ProgramData\notbefore\event-log.bookmark'
)
$ErrorActionPreference = 'Stop'
$source = 'notbefore'
if (-not [Diagnostics.EventLog]::SourceExists($source)) { New-EventLog -LogName Application -Source $source } # as administrator, once

$since = if (Test-Path $Bookmark) { (Get-Content $Bookmark -TotalCount 1).Trim() } else { '' }
$query = if ($since) { '&since=' + [Uri]::EscapeDataString($since) } else { '' }
$body = (Invoke-WebRequest -UseBasicParsing "$Url/api/v1/history?limit=1000$query").Content
foreach ($change in (ConvertFrom-Json $body).changes) {
    if ($change.time -eq $since) { continue } # `since` itself is part of the answer
    $grave = $change.'azure.scheduled_event.scope' -eq 'self' -and $change.'azure.scheduled_event.type' -ne 'Freeze'
    Write-EventLog -LogName Application -Source $source -EventId 1 -Message (ConvertTo-Json $change) `
        -EntryType $(if ($grave) { 'Warning' } else { 'Information' })
    Set-Content $Bookmark $change.time
}
