"""The first part of an attempt: the job's rows. No torch here, which is imported meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from apis.errors import DataInvalid, ModelNotFound
from apis.post_training.models import JobProgress
from post_training.data.job_rows import JobRows, read_job_rows
from post_training.jobs.spec import JobSpec
from post_training.training.interruption import Interrupted
from post_training.worker.lease import Lease


def read_rows(lease: Lease, spec: JobSpec, home: Path) -> JobRows:
    """Read all rows of the job, tokenised, and store the report on them.

    Raises:
        DataInvalid: with the row's number; or an earlier attempt of this job read other rows.
        ModelNotFound: a folder of the model is gone.
        Unavailable: a source could not be read in time.
        Interrupted, LeaseLost.
    """
    if lease.should_stop():
        raise Interrupted
    lease.update(progress=JobProgress(phase="tokenize"))
    _check_model_files(spec)
    earlier = lease.store.get(lease.job_uuid).report or {}
    data = read_job_rows(spec, home, earlier)
    _check_same(earlier, data.report)
    held_out = "" if data.validation is None else f", {len(data.validation.rows)} to validate"
    message = f"tokenized {len(data.training.rows)} rows to train on{held_out}"
    lease.update(report=data.report, message=message)
    return data


def _check_model_files(spec: JobSpec) -> None:
    """Raises ModelNotFound where a folder of the model is gone, most likely since the job was accepted."""
    model = spec.model
    for identifier, folder, file in (
        (model.base_identifier, model.base_dir, "config.json"),
        (model.identifier, model.adapter_dir, "adapter_config.json"),
    ):
        if folder is not None and not (Path(folder) / file).is_file():
            raise ModelNotFound(
                f"the files of model {identifier!r} are gone ({file} is missing): import or train it again",
                param="model",
            )


def _check_same(earlier: dict[str, Any], report: dict[str, Any]) -> None:
    for name in ("dataset", "validation_dataset"):
        digest = report.get(name, {}).get("fingerprint")
        if earlier.get(name, {}).get("fingerprint", digest) != digest:
            raise DataInvalid(f"the rows of {name} have changed since the job began; submit it again under another id")
