"""Checkpoints brought to this machine: resumed where a transfer was cut, proven by their hashes, in place at once."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

import httpx

from apis.errors import Conflict, DiskFull, FileMissing, InvalidField, ModelInvalid, PostgradError, Unavailable
from apis.post_training.models import CheckpointFile
from post_training.client import calls
from post_training.client.core import Settings
from post_training.client.transport import SyncTransport
from post_training.client.waiting import Outage

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None

Form = Literal["adapter", "merged", "all"]
OnProgress = Callable[[int, int], object]
"""Called with the bytes that are here and the bytes there will be."""

_PAUSE_SECONDS = 0.5
_HASH_CHUNK = 1 << 20
_NO_MERGED = "; a stack with `export: merged` writes one, and so does `postgrad models export --merged` there"
_NO_ADAPTER = ": every weight was trained; ask for merged, which is the whole model"


class Stopped(Exception):
    """The download was told to stop; what has come stays for the next one."""


class CheckpointDownload:
    """One download of one checkpoint.

    What comes is written to a hidden folder beside `to`, called by what it will hold, so that a later download of the
    same files goes on where this one was cut. It becomes `to` when every file has the size and sha256 it must have.
    """

    def __init__(
        self,
        transport: SyncTransport,
        job_uuid: str,
        step: int,
        to: str | os.PathLike[str],
        form: Form,
        on_progress: OnProgress | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._transport, self._job_uuid, self._step = transport, job_uuid, step
        self._to, self._form = Path(to).expanduser().resolve(), form
        self._on_progress, self._stop = on_progress, stop or threading.Event()
        self._here = self._whole = 0

    def run(self) -> Path:
        """Download, check, move into place. Returns the folder.

        Raises:
            InvalidField: `to` cannot be written or is not empty, or there is no such form.
            FileMissing: the checkpoint does not hold that form.
            Conflict: another download writes there.
            ModelInvalid: a file differs from its hash.
            DiskFull, and whatever the server answers.
        """
        if self._form not in get_args(Form):
            raise InvalidField(f"form must be one of {', '.join(get_args(Form))}", param="form")
        self._refuse_occupied()
        files = self._chosen(self._transport.send(calls.checkpoint_files(self._job_uuid, self._step)))
        self._whole = sum(file.size for file in files.values())
        partial = self._to.with_name(f".{self._to.name}.partial-{_digest(files)}")
        with _local_faults(self._to), _locked(partial):
            for name, file in files.items():
                self._fetch(file, partial / name)
            self._refuse_occupied()
            partial.rename(self._to)
        return self._to

    def _refuse_occupied(self) -> None:
        if self._to.is_dir() and not any(self._to.iterdir()):
            return
        if self._to.exists() or self._to.is_symlink():
            raise InvalidField(f"{self._to} is there already and is not an empty folder: choose another", param="to")

    def _chosen(self, files: list[CheckpointFile]) -> dict[str, CheckpointFile]:
        """The files of the form, by their names below `to`."""
        prefix = "" if self._form == "all" else f"{self._form}/"
        chosen = {file.name.removeprefix(prefix): file for file in files if file.name.startswith(prefix)}
        for name in chosen:
            if "\\" in name or PurePosixPath(name).is_absolute() or not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise PostgradError(f"the server names a file {name[:100]!r}, which would not lie in the folder")
        if not chosen:
            hint = {"merged": _NO_MERGED, "adapter": _NO_ADAPTER}.get(self._form, "")
            raise FileMissing(
                f"checkpoint {self._step} of job {self._job_uuid!r} has no {self._form} form{hint}", param="form"
            )
        return chosen

    def _fetch(self, file: CheckpointFile, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        before = self._here
        for _ in range(2):  # what an earlier download left may be wrong; what comes now should not
            self._complete(file, target, before)
            if _sha256(target) == file.sha256:
                self._here = before + file.size
                return
            target.unlink()
        raise ModelInvalid(f"{file.name} differs from its sha256 as it arrives: download it again later")

    def _complete(self, file: CheckpointFile, target: Path, before: int) -> None:
        """Ask for what is missing until it is there."""
        outage = Outage(seen=True)
        target.touch()
        while (have := target.stat().st_size) != file.size:
            offset = have if have < file.size else 0
            try:
                call = calls.checkpoint_file(self._job_uuid, self._step, file, offset)
                with self._transport.opened(call) as response:
                    self._write(response, target, offset, before)
            except Unavailable as error:
                outage.went_on(error)
                self._sleep()
            else:
                if target.stat().st_size != file.size:
                    raise ModelInvalid(f"{file.name} comes with another size than its checkpoint says")
            if target.stat().st_size > have:
                outage.over()

    def _write(self, response: httpx.Response, target: Path, offset: int, before: int) -> None:
        goes_on = response.status_code == 206 and response.headers.get("content-range", "").startswith(
            f"bytes {offset}-"
        )
        with target.open("ab" if goes_on else "wb") as out:
            for chunk in response.iter_raw():
                if self._stop.is_set():
                    raise Stopped
                out.write(chunk)
                if self._on_progress is not None:
                    self._on_progress(before + out.tell(), self._whole)

    def _sleep(self) -> None:
        if self._stop.wait(_PAUSE_SECONDS):
            raise Stopped


def _digest(files: dict[str, CheckpointFile]) -> str:
    content = json.dumps([(name, file.sha256) for name, file in sorted(files.items())])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, made where it is missing, for this download alone. Raises Conflict."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Conflict("another download writes there now: wait for it, or choose another folder", param="to") from None
    finally:
        os.close(descriptor)


@contextmanager
def _local_faults(to: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"no space left on the disk of {to}: free some and download again, it goes on") from error
        raise InvalidField(f"{to} cannot be written ({error.strerror}): choose another folder", param="to") from error


def download_file(
    transport: SyncTransport,
    job_uuid: str,
    step: int,
    file: CheckpointFile,
    to: Path,
    stop: threading.Event | None = None,
) -> None:
    """Bring one file of a checkpoint to `to`, which appears when it has the size and sha256 it must have.

    Raises:
        ModelInvalid: it differs from its hash.
        Conflict: another download writes there.
        DiskFull, Unavailable, and whatever the server answers.
    """
    download = CheckpointDownload(transport, job_uuid, step, to, "all", stop=stop)
    partial = to.with_name(f".{to.name}.partial-{file.sha256[:16]}")
    with _local_faults(to), _locked(partial):
        download._fetch(file, partial / "content")
        (partial / "content").rename(to)
        partial.rmdir()


async def download_in_thread(
    settings: Settings,
    job_uuid: str,
    step: int,
    to: str | os.PathLike[str],
    form: Form,
    on_progress: OnProgress | None,
) -> Path:
    """As `CheckpointDownload.run`, on a connection of its own; it stops soon after the caller is cancelled."""
    stop = threading.Event()

    def work() -> Path:
        with closing(SyncTransport(settings)) as transport:
            return CheckpointDownload(transport, job_uuid, step, to, form, on_progress, stop).run()

    try:
        return await asyncio.to_thread(work)
    finally:
        stop.set()
