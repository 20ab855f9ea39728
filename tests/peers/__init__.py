"""Far sides that are programs of their own."""
