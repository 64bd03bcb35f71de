"""The state folder: everything Postgrad writes lies under it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from apis.errors import StackError

VARIABLE = "POSTGRAD_HOME"
DEFAULT = "~/.postgrad"
LOCK = ".lock"


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """`$POSTGRAD_HOME`, else `~/.postgrad`, as an absolute path. Creates nothing."""
    named = environ.get(VARIABLE) or DEFAULT
    if named == "~" or named.startswith("~/"):
        named = (environ.get("HOME") or os.path.expanduser("~")) + named[1:]
    return Path(os.path.abspath(named))


def lock_home(home: Path) -> IO[str]:
    """Keep every other server off the state folder for as long as the returned file is open.

    Raises:
        StackError: another server has it.
    """
    file = (home / LOCK).open("a+", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise StackError(f"the state folder {home} cannot be locked ({error.strerror})") from error
        raise StackError(
            f"another server runs on the state folder {home}: stop it, or set ${VARIABLE} to another folder"
        ) from None
    return file


def ensure_home(home: Path) -> bool:
    """Make the state folder, readable by its owner only, and say whether it was made by this call.

    Raises:
        StackError: it cannot be made, or is not a folder that can be written to.
    """
    made = not home.exists()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StackError(
            f"cannot make the state folder {home} ({error.strerror}): set ${VARIABLE} to another"
        ) from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise StackError(f"the state folder {home} cannot be written to: set ${VARIABLE} to another")
    return made
