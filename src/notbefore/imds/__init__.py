"""Access to IMDS: plain HTTP to one address, never through a proxy, never after a redirect."""
