"""The fleet: reads the changes of all VMs from an Event Hub, merges them into one story per event,
and notifies once.

Data flow: ``consumer`` (the hub's partitions) -> ``hub_records`` (bytes to a report) ->
``partition`` and ``story`` (many VMs' reports to one story) -> ``waves`` (groups of stories, and
the times of their notifications) -> ``outbox`` (the deliveries of all partitions) -> the courier.
``keeper`` decides when the snapshot of a partition is written, ``snapshot`` defines its content,
``snapshot_store`` and ``blob_snapshots`` store it.
"""
