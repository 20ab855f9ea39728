"""The fleet: the changes of all VMs, read from an Event Hub, become one story an event, and each is notified once.

The way of the data: ``consumer`` (the hub's partitions) -> ``reading`` (bytes to a report) -> ``merge`` (many VMs'
reports to one story) -> ``waves`` (stories that belong together, and when people are notified of them) -> ``store``
(the outbox, as the agent has it) -> the courier.

- ``reading``: bytes of the hub -> ``Report`` or ``Beat``; what cannot be read is ``Poison``. Pure.
- ``merge``: ``Story``, and the tables that say what the reports of many VMs make of it. Pure.
- ``waves``: ``Waves``, the groups of Alertmanager's words: ``group_by``, ``group_wait``, ``group_interval``. Pure.
- ``silence``: which VMs were heard from, and which have fallen silent. Pure.
- ``partition``: the fold over one partition's log, and its snapshot. Pure.
- ``checkpoints``: where snapshots and checkpoints are kept: files, or Blob Storage (``blob_snapshots``).
- ``consumer``: the hub itself; which partitions are this instance's.
- ``inventory``, ``comparison``: the VMs that are to be heard from, and those that are not.
- ``history``: the events that are over, as files; ``report``, ``plots``, ``page``: what they say, as figures and HTML.
- ``instance``: the process: makes the parts, joins them, looks after the courier.
- ``view``: what a scrape, the page and the interface show; ``coming``: of waves; ``month``: of the last 30 days.
"""
