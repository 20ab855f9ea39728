"""The fleet: reads the changes of all VMs from an Event Hub, merges them into one story per event,
and notifies once.

Data flow: ``consumer`` (the hub's partitions) -> ``hub_records`` and ``azure_messages`` (bytes to a
report of a VM, or of Azure) -> ``partition``, ``events`` and ``story`` (all reports to one story)
-> ``waves`` (groups of stories, and the times of their notifications) -> ``outbox`` (the deliveries
of all partitions) -> the courier. ``keeper`` decides when the snapshot of a partition is written,
``snapshot`` defines its content, ``snapshot_store`` and ``blob_snapshots`` store it.
"""
