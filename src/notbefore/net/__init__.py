"""HTTP for everything but IMDS, and the redaction of secrets."""
