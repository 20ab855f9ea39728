"""SHA-256 of what identifies a change, a delivery or an event's content."""


def sha256(content: bytes) -> str:
    """The digest of ``content``, 64 hexadecimal digits."""
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, 3.5 MB: an agent that has seen no event does not need it

    return hashlib.sha256(content).hexdigest()
