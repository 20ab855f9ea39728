"""A simulated IMDS for trials and tests: the scenarios of real VMs, in real or fast time, and
faults.
"""
