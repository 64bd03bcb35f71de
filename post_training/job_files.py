"""The files of a job: those of its checkpoints as they are handed out, and all of them as they are deleted."""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from apis.errors import CheckpointNotFound, FileMissing, JobNotFound, ModelInvalid, Unavailable
from apis.post_training.models import CheckpointFile, CheckpointFilesResponse, StoredFile
from post_training.catalog.naming import folder_name
from post_training.checkpoints.layout import Manifest, checkpoints_root, fsync, read_manifest
from post_training.jobs.store import JobStore

_DELETED = re.compile(r"\.deleted-[0-9a-f]{8}-(?P<folder>.+)")
logger = logging.getLogger(__name__)


class CheckpointFiles:
    """Hands out files of finished checkpoints: exactly those that a manifest names, never what a link points to."""

    def __init__(self, home: Path, store: JobStore) -> None:
        self._home = home
        self._store = store

    def list(self, job_uuid: str, step: int) -> CheckpointFilesResponse:
        """Raises JobNotFound, CheckpointNotFound, ModelInvalid."""
        _, manifest = self._checkpoint(job_uuid, step)
        files = [
            CheckpointFile(name=name, size=record.size, sha256=record.sha256)
            for name, record in sorted(manifest.files.items())
        ]
        return CheckpointFilesResponse(job_uuid=job_uuid, step=step, data=files)

    def find(self, job_uuid: str, step: int, name: str) -> StoredFile:
        """One file by its name in the manifest. Raises FileMissing besides what `list` raises."""
        directory, manifest = self._checkpoint(job_uuid, step)
        record = manifest.files.get(name)
        if record is None:
            raise FileMissing(
                f"checkpoint {step} of job {job_uuid!r} has no file {name[:200]!r}; its `files` route lists them",
                param="name",
            )
        path = directory / name
        if not _is_plain(directory, path, record.size):
            raise ModelInvalid(
                f"checkpoint {step} of job {job_uuid!r}: {name} is not what was written there; use another checkpoint"
            )
        return StoredFile(path, record.size, record.sha256)

    def _checkpoint(self, job_uuid: str, step: int) -> tuple[Path, Manifest]:
        self._store.get(job_uuid)
        steps = [row.step for row in self._store.checkpoints(job_uuid)]
        if step not in steps:
            known = f"those of steps {', '.join(map(str, steps))}" if steps else "none yet"
            raise CheckpointNotFound(
                f"job {job_uuid!r} has no finished checkpoint of step {step}; it has {known}", param="step"
            )
        directory = checkpoints_root(self._home, job_uuid) / str(step)
        return directory, read_manifest(directory)


def _is_plain(directory: Path, path: Path, size: int) -> bool:
    """Whether `path` is a file of `size` bytes below `directory`, with no link on the way."""
    parts = path.relative_to(directory).parts
    if any(part in ("..", ".") for part in parts):
        return False
    try:
        for depth in range(1, len(parts)):
            if not stat.S_ISDIR(directory.joinpath(*parts[:depth]).lstat().st_mode):
                return False
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def delete_job(home: Path, store: JobStore, job_uuid: str, forget: Callable[[Session], None]) -> None:
    """Delete a job that has ended: rows, what `forget` removes in the same transaction, and files.

    The folder is renamed just before the commit, so that whenever the server dies, `finish_deletions` can tell from the
    store which way to go.

    Raises:
        JobNotFound, Conflict: as `JobStore.delete`; nothing has changed then.
    """
    folder = checkpoints_root(home, job_uuid).parent
    hidden = folder.with_name(f".deleted-{secrets.token_hex(4)}-{folder.name}")

    def also(session: Session) -> None:
        forget(session)
        session.flush()
        if folder.exists():
            folder.rename(hidden)
            fsync(folder.parent)

    try:
        store.delete(job_uuid, also)
    except BaseException:
        if hidden.exists():
            _remove(hidden) if _is_gone(store, job_uuid) else hidden.rename(folder)
        raise
    _remove(hidden)


def _is_gone(store: JobStore, job_uuid: str) -> bool:
    """Whether a deletion took effect although its commit raised an error, as a lost connection may do."""
    try:
        store.get(job_uuid)
    except JobNotFound:
        return True
    except (SQLAlchemyError, Unavailable):
        logger.warning("whether job %s was deleted is not known; its files stay", job_uuid)
    return False


def finish_deletions(home: Path, store: JobStore) -> None:
    """Finish or undo deletions that a server was killed in. Call it before any job can start or be deleted."""
    jobs = home / "jobs"
    hidden = [path for path in jobs.iterdir() if path.name.startswith(".deleted-")] if jobs.is_dir() else []
    if not hidden:
        return
    standing = {folder_name(job.job_uuid) for job in store.summaries()}
    for path in hidden:
        match = _DELETED.fullmatch(path.name)
        if match is None or match["folder"] not in standing:
            _remove(path)
        elif (jobs / match["folder"]).exists():
            logger.error("%s and %s are files of the same job; both stay", path.name, match["folder"])
        else:
            path.rename(jobs / match["folder"])


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("files of a deleted job are left in %s; they are removed at the next start", folder.name)
