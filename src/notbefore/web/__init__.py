"""The agent's HTTP listener: metrics in Prometheus's formats, the JSON API, the page, and who may
read them.
"""
