"""The core: documents of IMDS to changes, records, deliveries and approvals.

Pure: no I/O, no clock, no logging.
"""
