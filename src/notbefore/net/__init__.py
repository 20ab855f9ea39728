"""HTTP for everybody but the client of IMDS, and the redaction of secrets."""
