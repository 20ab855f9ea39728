"""A simulated IMDS for trials and tests.

It plays the scenarios of real VMs, in real or fast time, with faults on request.
"""
