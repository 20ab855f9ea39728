"""The parts of every always-on process: clocks, signals, standard output, systemd."""
