"""An output that one process at a time writes to, in a folder that can be written to."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_log = logging.getLogger(__name__)


@contextmanager
def claimed(output: Path, *also: Path) -> Iterator[None]:
    """Nobody else writes `output` meanwhile, and temporary files that killed runs left of it are gone.

    A folder that is read-only or full is an error now and not after hours. The lock is a file beside the output; it
    ends with the process, also when that is killed.

    Args:
        output: the file that will be written.
        also: more files that are written on the way, such as checkpoints.
    """
    if not output.parent.is_dir():
        raise ValueError(f"there is no folder {output.parent} to write to")
    if output.is_dir():
        raise ValueError(f"{output} is a folder: name a file in it")
    lock = output.with_name(f".{output.name}.lock")
    handle = _locked(lock, output)
    try:
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        os.fsync(handle)
        for path in (output, *also):
            remove_leftovers(path.parent, re.escape(path.name))
        yield
    except OSError as error:
        if error.errno and error.filename is None:  # a full disk does not say which file
            raise OSError(error.errno, error.strerror, str(output)) from error
        raise
    finally:
        with suppress(PermissionError):  # Windows keeps files that are open
            lock.unlink(missing_ok=True)
        os.close(handle)


def _locked(lock: Path, output: Path) -> int:
    """The open lock file, once it is ours and still there: its last owner removes it."""
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(output)) from error
        try:
            if sys.platform == "win32":
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(handle), os.stat(lock)):
                return handle
        except FileNotFoundError:
            pass
        except (BlockingIOError, PermissionError):
            os.close(handle)
            raise ValueError(f"another process is writing {output}: wait for it, or name another file") from None
        except OSError as error:  # some network file systems have no locks
            _log.warning("%s cannot be locked (%s): see that no other process writes it", output, error.strerror)
            return handle
        os.close(handle)


def remove_leftovers(folder: Path, pattern: str, *, older: float = 0.0) -> None:
    """Removes files that a killed process began to write for names of this pattern and did not get to rename.

    Where others may be writing just now, `older` spares the files of so many seconds.
    """
    name = re.compile(rf"\.({pattern})\.[0-9a-f]{{1,16}}")
    for entry in os.listdir(folder):
        if name.fullmatch(entry):
            with suppress(FileNotFoundError):  # renamed or removed by its owner
                if time.time() - (folder / entry).stat().st_mtime >= older:
                    (folder / entry).unlink()
