"""A checkpoint as a whole model, merged on demand. The work is done by a process with torch; this side has none."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Literal

from apis.errors import InvalidField, Unavailable
from post_training.catalog.models import ModelCatalog
from post_training.catalog.naming import folder_name
from post_training.checkpoints.child import run_child
from post_training.checkpoints.layout import fsync, fsync_tree

_EXPORT_SECONDS = 4 * 3600


def export_merged(models: ModelCatalog, identifier: str, dtype: Literal["fp32", "bf16"] = "fp32") -> Path:
    """Merge a checkpoint into `<home>/exports/<id>-merged-<dtype>/`, verified before it appears.

    A checkpoint never changes, so an export that is there already is returned as it is.

    Raises:
        ModelNotFound: no model has that name.
        InvalidField: it is a base model: there is nothing to merge.
        ModelInvalid: the adapter cannot be merged exactly.
        CheckpointUnverified: the result does not compute what base and adapter do.
        DiskFull, OutOfMemory, Unavailable: the merge could not be done.
    """
    model = models.resolve(identifier)
    if model.adapter_dir is None:
        raise InvalidField(
            f"{identifier!r} is a base model, there is nothing to merge: name a checkpoint", param="model"
        )
    target = models.home / "exports" / f"{folder_name(model.identifier)}-merged-{dtype}"
    if target.is_dir():
        return target
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    request = {
        "base_dir": str(model.base_dir),
        "adapter_dir": str(model.adapter_dir),
        "out_dir": str(temporary),
        "dtype": dtype,
    }
    temporary.mkdir(parents=True)
    try:
        run_child(
            "post_training.checkpoints.export",
            request,
            what=f"the export of {model.identifier!r}",
            failure=Unavailable,
            timeout=_EXPORT_SECONDS,
        )
        fsync_tree(temporary)
        _move(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _move(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
        fsync(target.parent)
    except OSError:
        if not target.is_dir():  # else a concurrent export of the same checkpoint was first
            raise
