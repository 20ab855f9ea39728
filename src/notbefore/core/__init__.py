"""The core: what Azure said becomes what changed. Pure: no I/O, no clock, no logging."""
