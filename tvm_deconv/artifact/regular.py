"""Regular files: what anybody may have put in the place of one, a pipe or a device, is neither waited for nor read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: Most bytes of a text that programs keep, such as a log of one problem: its parts in memory are ten times as large.
MOST_TEXT = 1 << 26
#: How such files are opened: without O_NONBLOCK a named pipe would wait for its other end.
CAREFUL = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def content_of(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError, also for all else."""
    with open(path, "rb", opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most}", str(path))
        return file.read(most)


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that anybody may have put there, as `open` wants it. Raises OSError if it is no regular one."""
    descriptor = os.open(path, flags | CAREFUL, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
