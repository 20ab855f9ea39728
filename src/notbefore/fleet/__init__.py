"""The fleet: the changes of all VMs, read from an Event Hub, become one story an event, and each is notified once.

The way of the data: ``consumer`` (the hub's partitions) -> ``reading`` (bytes to a report) -> ``merge`` (many VMs'
reports to one story) -> ``waves`` (stories that belong together, and when people are notified of them) -> ``outbox``
(all partitions' deliveries) -> the courier. ``keeper`` writes one snapshot a partition, with all of it.
"""
