"""The worker process: runs one attempt of one job and says how it ended.

    POSTGRAD_DATABASE_URL=… POSTGRAD_JOB_OWNER=… python -m post_training.worker.main --home DIR --job ID

It exits with 0 once the store knows the attempt's end, whatever that end was, and with 3 where its lease was over and
it could say nothing more. Anything else is a death, which the scheduler records.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import traceback
from pathlib import Path

from apis.errors import JOB_FAILURE_CODES, CheckpointUnverified, JobFailure, OutOfMemory, PostgradError
from apis.post_training.models import JobError, JobStatus
from post_training.checkpoints.layout import checkpoints_root, disk_full
from post_training.checkpoints.space import FreeBytes, free_bytes, hold_reserve
from post_training.jobs.database import Database
from post_training.jobs.spec import JobSpec
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.training.interruption import Interrupted
from post_training.worker.keeping import clean, discard_unannounced, release_room
from post_training.worker.lease import Lease

logger = logging.getLogger(__name__)

LOST_EXIT_CODE = 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Run one attempt of one job.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--job", required=True)
    arguments = parser.parse_args()
    level = os.environ.get("LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    database = Database(os.environ.pop("POSTGRAD_DATABASE_URL"))
    owner = os.environ.pop("POSTGRAD_JOB_OWNER")
    try:
        with Lease(JobStore(database), arguments.job, owner) as lease:
            attempt(lease, arguments.home, os.environ.get("POSTGRAD_DEVICE"))
    except LeaseLost as error:
        logger.warning("job %s is not this worker's any more (%s); nothing was written", arguments.job, error.message)
        return LOST_EXIT_CODE
    finally:
        database.close()
    return 0


def attempt(lease: Lease, home: Path, device: str | None = None, free: FreeBytes = free_bytes) -> None:
    """Run the job and store the attempt's end.

    Args:
        device, free: see `run_job`.

    Raises:
        LeaseLost: the job is another's, or the store could not be reached while the lease held.
    """
    try:
        try:
            clean(lease, home)
            hold_reserve(checkpoints_root(home, lease.job_uuid))
            _run(lease, home, device, free)
        except (Interrupted, LeaseLost):
            raise
        except Exception as error:
            _fail(lease, home, error)
    except Interrupted:
        _store_interruption(lease, home)


def _run(lease: Lease, home: Path, device: str | None, free: FreeBytes) -> None:
    spec = _spec(lease)
    # Only now: torch takes seconds to import, in which the lease must beat and a stop be heard.
    from post_training.worker.job_loop import run_job

    run_job(lease, spec, home, device=device, free=free)


def _spec(lease: Lease) -> JobSpec:
    return JobSpec.model_validate(lease.store.get(lease.job_uuid).spec)


def _store_interruption(lease: Lease, home: Path) -> None:
    if lease.stop_reason == "lost":
        raise LeaseLost("the lease is over")
    release_room(lease, home)
    lease.confirm()  # a cancel may have come since the last look
    if lease.stop_reason == "cancelled":
        discard_unannounced(lease, home)
        lease.finish(JobStatus.cancelled, "cancelled while running")
    else:
        clean(lease, home)
        lease.finish(JobStatus.scheduled, "the server stopped; the job waits for its next start")


def _fail(lease: Lease, home: Path, error: Exception) -> None:
    """Save what can be saved of the job's work, then store why it failed.

    Raises:
        Interrupted: told to stop while the newest checkpoint was verified. After a stop by the server the next attempt
            will come to the same failure.
        LeaseLost
    """
    if lease.stop_reason == "lost":
        # What went wrong may come of that: the next owner removes what it did not write itself.
        raise LeaseLost("the lease is over") from error
    release_room(lease, home)
    logger.error("job %s failed", lease.job_uuid, exc_info=error)
    told = failure(error)
    clean(lease, home)
    if not isinstance(error, CheckpointUnverified):
        _rescue(lease, home, error)
    discard_unannounced(lease, home)
    lease.finish(JobStatus.failed, f"{told.code}: {told.message}", told)


def _rescue(lease: Lease, home: Path, error: Exception) -> None:
    """Announce the newest checkpoint where that is possible. Raises Interrupted, LeaseLost."""
    # The frames of the failure hold the model, whose memory the verification needs.
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    try:
        from post_training.worker.saving import rescue

        rescue(lease, _spec(lease), home)
    except (Interrupted, LeaseLost):
        raise
    except Exception as second:
        logger.warning("the newest checkpoint could not be announced: %s", second)


def failure(error: BaseException) -> JobError:
    """An exception as a user may see it: a stable code, no traceback, no path."""
    known = _known(error)
    if known is not None:
        code = known.code if known.code in JOB_FAILURE_CODES else JobFailure.code
        return JobError(code=code, message=known.message, param=known.param)
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
    sys.exit(main())
