"""A model in another form, made on demand, with its card.

The work is done by a process with torch; this side has none.
"""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from apis.errors import InvalidField, JobNotFound, ModelInvalid, NotSupported, Unavailable
from post_training.catalog.models import ModelCatalog, ResolvedModel
from post_training.catalog.naming import folder_name
from post_training.checkpoints.child import run_child
from post_training.checkpoints.layout import disk_full, fsync, fsync_tree, read_manifest
from post_training.checkpoints.model_card import Run, render_card, write_card
from post_training.jobs.spec import JobSpec
from post_training.jobs.store import JobStore

_EXPORT_SECONDS = 4 * 3600


def export_merged(models: ModelCatalog, identifier: str, dtype: Literal["fp32", "bf16"] = "fp32") -> Path:
    """Merge a checkpoint into `<home>/exports/<id>-merged-<dtype>/`, verified before it appears.

    A checkpoint never changes, so an export that is there already is returned as it is. It has the card of the run that
    made the checkpoint.

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
    temporary = _temporary(target)
    request = {
        "base_dir": str(model.base_dir),
        "adapter_dir": str(model.adapter_dir),
        "out_dir": str(temporary),
        "dtype": dtype,
    }
    temporary.mkdir(parents=True)
    try:
        measured = _run("post_training.checkpoints.export", request, model.identifier)
        _write_card(temporary, _made_by(models, model), measured)
        fsync_tree(temporary)
        _move(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def export_gguf(
    models: ModelCatalog,
    identifier: str,
    dtype: Literal["f32", "bf16", "f16", "q8_0"] = "f32",
    to: Path | None = None,
) -> Path:
    """Write a checkpoint, or a base model, as one GGUF file for llama.cpp.

    A checkpoint is merged in fp32 first, which needs room for that beside the file for a while; the merge is verified.
    The card of the run that made it is the file's `general.description`.

    Args:
        to: a file that does not exist. None: `<home>/exports/<id>-<dtype>.gguf`; one that is there already is returned
            as it is for a checkpoint, which never changes, and written anew for a base model.

    Raises:
        ModelNotFound: no model has that name.
        InvalidField: `to` exists, or its folder does not.
        NotSupported: the `gguf` package is not installed.
        UnsupportedModel: its architecture or tokenizer, or an option of them, is none that the export knows.
        ModelInvalid: the model's files are damaged, or the adapter cannot be merged exactly.
        CheckpointUnverified: the merge does not compute what base and adapter do.
        DiskFull, OutOfMemory, Unavailable: the export could not be done.
    """
    model = models.resolve(identifier)
    if find_spec("gguf") is None:
        raise NotSupported("GGUF export needs the gguf package: pip install 'gguf>=0.19'")
    target = to or models.home / "exports" / f"{folder_name(model.identifier)}-{dtype}.gguf"
    if to is None:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and model.adapter_dir is not None:
            return target
    else:
        _check_free(to)
    temporary = _temporary(target)
    run = _made_by(models, model)
    request = {
        "base_dir": str(model.base_dir),
        "adapter_dir": None if model.adapter_dir is None else str(model.adapter_dir),
        "out_file": str(temporary),
        "name": model.identifier,
        "dtype": dtype,
        "description": None if run is None else render_card("gguf", run),
    }
    try:
        _run("post_training.checkpoints.gguf_export", request, model.identifier)
        fsync(temporary)
        temporary.rename(target)
        fsync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _check_free(to: Path) -> None:
    if to.exists():
        raise InvalidField(f"{to} is there already: name another file, or remove it", param="to")
    if not to.parent.is_dir():
        raise InvalidField(f"there is no folder {to.parent}: make it first", param="to")


def _made_by(models: ModelCatalog, model: ResolvedModel) -> Run | None:
    """The run that made a checkpoint; None for a base model, and for an adapter that no job of this store made."""
    if model.adapter_dir is None:
        return None
    try:
        manifest = read_manifest(model.adapter_dir.parent)
        job = JobStore(models.database).get(manifest.job_uuid)
    except (ModelInvalid, JobNotFound):
        return None
    report = job.report or {}
    return Run(
        spec=JobSpec.model_validate(job.spec).settled(report),
        identifier=model.identifier,
        step=manifest.step,
        epoch=manifest.epoch,
        metrics=manifest.metrics or {},
        report=report,
        versions=manifest.versions,
    )


def _write_card(folder: Path, run: Run | None, measured: dict[str, Any]) -> None:
    if run is None:
        return
    try:
        write_card(folder, "merged", replace(run, merge=measured))
    except OSError as error:
        if full := disk_full(error, "the model's card"):
            raise full from error
        raise


def _run(module: str, request: dict[str, Any], identifier: str) -> dict[str, Any]:
    return run_child(
        module, request, what=f"the export of {identifier!r}", failure=Unavailable, timeout=_EXPORT_SECONDS
    )


def _temporary(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def _move(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
        fsync(target.parent)
    except OSError:
        if not target.is_dir():  # else a concurrent export of the same checkpoint was first
            raise
