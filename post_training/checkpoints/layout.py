"""The checkpoint directory: written beside its place, fsynced, renamed. No torch here, since the server reads it too.

    <home>/jobs/<job>/checkpoints/<step>/
        adapter/          adapter_model.safetensors, adapter_config.json, tokenizer and chat template
        merged/           a whole Hugging Face model, when asked for
        training_state/   state.safetensors, state.json
        manifest.json     hashes of all the files above; written last

A directory without a manifest is no checkpoint: nothing here reads it, and the next attempt removes it. So is one that
the job store does not know: it is recorded there right after it has its place.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from apis.errors import DiskFull, ModelInvalid
from post_training.catalog.model_files import PICKLE_SUFFIXES
from post_training.catalog.naming import folder_name

MANIFEST = "manifest.json"
RESERVE = ".reserve"
"""A file beside the checkpoints that holds room while a worker runs; see `space.hold_reserve`."""
ADAPTER, MERGED, TRAINING_STATE = "adapter", "merged", "training_state"
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_LEFT_OVER = re.compile(r"\.\d+\.tmp-\d+-[0-9a-f]+")
_TAKEN_ERRORS = (errno.ENOTEMPTY, errno.EEXIST)
# How libraries that hide the number put it: SQLite in its own words, Rust and PostgreSQL in the operating system's.
_FULL_WORDS = ("database or disk is full", *(os.strerror(number) for number in FULL_ERRORS))
_CHUNK_BYTES = 1 << 20


class FileRecord(BaseModel):
    """A file's content: sha256 in hex, size in bytes."""

    model_config = ConfigDict(extra="forbid")

    sha256: str
    size: int


class Manifest(BaseModel):
    """What a checkpoint is and what every file of it must hold.

    Attributes:
        step: global optimizer step, from 1.
        epoch: from 0.
        files: by path relative to the checkpoint directory, with `/`; filled in by `CheckpointWriter.commit`.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    format_version: int = 1
    identifier: str
    job_uuid: str
    model: str
    base_model: str
    epoch: int
    step: int
    created_at: datetime
    metrics: dict[str, Any] | None = None
    versions: dict[str, str] = {}
    files: dict[str, FileRecord] = {}


def disk_full(error: BaseException | None, what: str) -> DiskFull | None:
    """DiskFull where `error`, or what caused it, says "no space left" or "quota exceeded" (while writing `what`)."""
    while error is not None:
        if _says_full(error):
            return DiskFull(
                f"no space left on the disk while writing {what}: free some space, or move $POSTGRAD_HOME to a larger "
                "disk"
            )
        error = error.__cause__
    return None


def _says_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in FULL_ERRORS
    # SQLAlchemy's own text quotes what was to be written, which may hold any words.
    said = str(getattr(error, "orig", error))
    return any(words in said for words in _FULL_WORDS)


def checkpoints_root(home: Path, job_uuid: str) -> Path:
    """The folder of a job's checkpoints."""
    return home / "jobs" / folder_name(job_uuid) / "checkpoints"


class CheckpointWriter:
    """Writes one checkpoint so that it appears whole or not at all.

        with CheckpointWriter(home, job_uuid, step) as writer:
            ...write into writer.adapter, writer.merged, writer.training_state...
            directory = writer.commit(manifest)

    Leaving the block without `commit`, by an exception or not, removes what was written.

    Raises:
        DiskFull: from the block or `commit`, where the disk or the quota is full.
    """

    def __init__(self, home: Path, job_uuid: str, step: int) -> None:
        root = checkpoints_root(home, job_uuid)
        self._home, self._step = home, step
        self.final = root / str(step)
        self.directory = root / f".{step}.tmp-{os.getpid()}-{secrets.token_hex(4)}"

    @property
    def adapter(self) -> Path:
        return self._folder(ADAPTER)

    @property
    def merged(self) -> Path:
        return self._folder(MERGED)

    @property
    def training_state(self) -> Path:
        return self._folder(TRAINING_STATE)

    def commit(self, manifest: Manifest, confirm: Callable[[], None] = lambda: None) -> Path:
        """Write the manifest, make all of it durable, move it into place.

        Args:
            confirm: called right before the move; raises where the writer may write no more. Where it returns, the job
                store may hold nothing that relies on a directory of this step: one that is there is removed.

        Returns:
            the final directory.

        Raises:
            ModelInvalid: the tree holds a pickle or a link.
        """
        files = {name: _record(self.directory / name) for name in _tree(self.directory)}
        complete = manifest.model_copy(update={"files": files})
        (self.directory / MANIFEST).write_text(complete.model_dump_json(indent=1) + "\n", encoding="utf-8")
        fsync_tree(self.directory)
        self._move(confirm)
        for folder in self.final.parents:  # the job's folders may be new as well
            fsync(folder)
            if folder == self._home:
                break
        return self.final

    def _move(self, confirm: Callable[[], None]) -> None:
        """Rename, which fails where the target has content: another writer's checkpoint is never replaced unseen."""
        confirm()
        try:
            self.directory.rename(self.final)
        except OSError as error:
            if error.errno not in _TAKEN_ERRORS:
                raise
            confirm()
            remove_tree(self.final)
            self.directory.rename(self.final)

    def _folder(self, name: str) -> Path:
        folder = self.directory / name
        folder.mkdir(exist_ok=True)
        return folder

    def __enter__(self) -> CheckpointWriter:
        try:
            self.directory.mkdir(parents=True)
        except OSError as error:
            self._say_disk_full(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._say_disk_full(error)

    def _say_disk_full(self, error: BaseException | None) -> None:
        if full := disk_full(error, f"the checkpoint of step {self._step}"):
            raise full from error


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        ModelInvalid: there is none, or it cannot be read.
    """
    try:
        return Manifest.model_validate_json((directory / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise ModelInvalid(f"checkpoint {directory.name} has no {MANIFEST}: it was never finished") from None
    except ValidationError as error:
        raise ModelInvalid(
            f"{MANIFEST} of checkpoint {directory.name} is damaged: {error.errors()[0]['msg']}"
        ) from error


def check_files(directory: Path) -> Manifest:
    """Hash every file of a checkpoint against its manifest.

    Raises:
        ModelInvalid: naming the first file that is missing, differs, or does not belong there.
    """
    manifest = read_manifest(directory)
    found = _tree(directory)
    for name in found:
        if name not in manifest.files:
            raise ModelInvalid(f"checkpoint {directory.name}: {name} is not in its manifest")
    for name, record in manifest.files.items():
        if name not in found:
            raise ModelInvalid(f"checkpoint {directory.name}: {name} is missing; use another checkpoint")
        if _record(directory / name) != record:
            raise ModelInvalid(f"checkpoint {directory.name}: {name} has changed since it was written; use another one")
    return manifest


def clean_partial(root: Path, recorded: Collection[int] | None = None) -> None:
    """Remove what an ended writer left under `root`. Call it only where no other writer can be at work there.

    Args:
        recorded: the steps that the job store knows; a complete directory of another step goes too, since nothing would
            ever resume from it or list it. None keeps every complete one.
    """
    if not root.is_dir():
        return
    (root / RESERVE).unlink(missing_ok=True)
    for path in root.iterdir():
        if _LEFT_OVER.fullmatch(path.name) or (path.name.isdecimal() and not _stands(path, recorded)):
            remove_tree(path)


def remove_tree(path: Path) -> None:
    """Remove a directory, whoever else may be removing it at the same time."""
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def _stands(path: Path, recorded: Collection[int] | None) -> bool:
    return (path / MANIFEST).is_file() and (recorded is None or int(path.name) in recorded)


def _tree(directory: Path) -> list[str]:
    """Relative names of all the files below, sorted, but for the manifest."""
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink() or path.suffix in PICKLE_SUFFIXES:
            raise ModelInvalid(f"{name} is a link or a pickle, which a checkpoint must not hold: remove it")
        if path.is_file() and name != MANIFEST:
            names.append(name)
    return names


def _record(path: Path) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(sha256=digest.hexdigest(), size=size)


def fsync_tree(directory: Path) -> None:
    """Make everything under `directory`, and its own list of names, durable."""
    for path in directory.rglob("*"):
        fsync(path)
    fsync(directory)


def fsync(path: Path) -> None:
    """Make one file, or one directory's list of names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
