"""A simulated IMDS to try everything against: the scenarios of real VMs, in real or fast time, and faults."""
