"""The worker process: runs one attempt of one job and says how it ended.

    POSTGRAD_DATABASE_URL=… POSTGRAD_JOB_OWNER=… python -m post_training.worker.main --home DIR --job ID

It exits with 0 once the store knows the attempt's end, whatever that end was; anything else is a death, which the
scheduler records.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from apis.errors import OutOfMemory, PostgradError
from apis.post_training.models import JobError, JobStatus
from post_training.checkpoints.layout import checkpoints_root, clean_partial, disk_full
from post_training.jobs.database import Database
from post_training.jobs.spec import JobSpec
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.training.interruption import Interrupted
from post_training.worker.lease import Lease

logger = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one attempt of one job.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--job", required=True)
    arguments = parser.parse_args()
    level = os.environ.get("LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    database = Database(os.environ.pop("POSTGRAD_DATABASE_URL"))
    owner = os.environ.pop("POSTGRAD_JOB_OWNER")
    with Lease(JobStore(database), arguments.job, owner) as lease:
        try:
            _attempt(lease, arguments.home)
        except LeaseLost:
            logger.warning("job %s belongs to another worker now; nothing was written", arguments.job)
    database.close()


def _attempt(lease: Lease, home: Path) -> None:
    """Run the job and store the attempt's end. Raises LeaseLost."""
    try:
        _clean(lease, home)
        _run(lease, home)
    except LeaseLost:
        raise
    except Interrupted:
        if lease.stop_reason != "lost":
            _clean(lease, home)
            _store_interruption(lease)
    except Exception as error:
        logger.exception("job %s failed", lease.job_uuid)
        told = failure(error)
        lease.finish(JobStatus.failed, f"{told.code}: {told.message}", told)
        _clean(lease, home)


def _clean(lease: Lease, home: Path) -> None:
    clean_partial(checkpoints_root(home, lease.job_uuid), lease.store.announced_steps(lease.job_uuid))


def _run(lease: Lease, home: Path) -> None:
    spec = JobSpec.model_validate(lease.store.get(lease.job_uuid).spec)
    # Only now: torch takes seconds to import, in which the lease must beat and a stop be heard.
    from post_training.worker.job_loop import run_job

    run_job(lease, spec, home)


def _store_interruption(lease: Lease) -> None:
    if lease.stop_reason == "cancelled":
        lease.finish(JobStatus.cancelled, "cancelled while running")
    else:
        lease.finish(JobStatus.scheduled, "the server stopped; the job waits for its next start")


def failure(error: BaseException) -> JobError:
    """An exception as a user may see it: a stable code, no traceback, no path."""
    known = _known(error)
    if known is not None:
        return JobError(code=known.code, message=known.message, param=known.param)
    return JobError(
        code=PostgradError.code,
        message=f"the worker met an unexpected {type(error).__name__}; its log on the server has the details",
    )


def _known(error: BaseException) -> PostgradError | None:
    if isinstance(error, PostgradError):
        return error
    if full := disk_full(error, "the job's files"):
        return full
    # torch.OutOfMemoryError is CUDA's; the CPU allocator raises a plain RuntimeError.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or "can't allocate memory" in str(error):
        return OutOfMemory(
            "out of memory; lower max_seq_len or batch_size, or set efficiency_config.enable_activation_checkpointing"
        )
    return None


if __name__ == "__main__":
    main()
