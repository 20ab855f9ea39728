"""What must survive a reboot: tracked events, totals, history. One SQLite file, one writer."""
