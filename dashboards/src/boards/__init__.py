"""The Grafana dashboards as code; ``python -m boards DIRECTORY`` writes their JSON."""
