"""The fleet: the changes of all VMs, read from an Event Hub, become one story an event, and each is notified once.

The way of the data: ``consumer`` (the hub's partitions) -> ``hub_records`` (bytes to a report) -> ``partition`` and
``story`` (many VMs' reports to one story) -> ``waves`` (stories that belong together, and when people are notified of
them) -> ``outbox`` (all partitions' deliveries) -> the courier. Of the snapshot of a partition, ``keeper`` says when it
is written, ``snapshot`` what is in it, ``checkpoints`` and ``blob_snapshots`` where it lies.
"""
