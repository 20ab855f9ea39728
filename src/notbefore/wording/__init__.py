"""The sentences that people read about an event: in messages, records, the page and commands.

Pure: no I/O, no clock, no logging.
"""
