"""What is measured: the one place where a metric is defined."""
