"""``give_back``: return freed memory to the system."""

import gc
from contextlib import suppress


def give_back() -> None:
    """Collect garbage and have the C library release what is free: by itself glibc keeps what a flood has needed."""
    import ctypes  # noqa: PLC0415 - only after a flood

    gc.collect()
    with suppress(AttributeError, OSError, TypeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
