"""The Grafana dashboards as code; ``python -m boards`` writes their JSON."""
