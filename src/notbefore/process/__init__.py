"""What every always-on process needs: the clocks, its courier, its store looked after, signals, systemd."""
