"""What an operating system may refuse, brought about for the length of a block."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_file_may_grow(size: int) -> Iterator[None]:
    """As if the disk were full behind so many bytes of each file, for this process and those that it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
