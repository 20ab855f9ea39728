"""notbefore: Azure Scheduled Events of this VM as metrics, records and notifications."""

__version__ = "0.1.0"
