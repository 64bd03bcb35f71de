"""The worker process: runs attempts of jobs, one after another, and says how each ended.

    python -m post_training.worker.main --home DIR < orders

Orders are those of `jobs/launchers/orders.py`; it waits for another one only after a job that ended in good order.
It exits with 0 once the store knows the attempt's end, whatever that end was, and with 3 where its lease was over and
it could say nothing more. Anything else is a death, which the scheduler records.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import traceback
from pathlib import Path

from apis.errors import JOB_FAILURE_CODES, CheckpointUnverified, JobFailure, OutOfMemory, PostgradError
from apis.post_training.models import JobError, JobStatus
from post_training.checkpoints.layout import checkpoints_root, disk_full
from post_training.checkpoints.space import FreeBytes, free_bytes, hold_reserve
from post_training.jobs.database import Database
from post_training.jobs.launchers.orders import Order
from post_training.jobs.spec import JobSpec
from post_training.jobs.states import LeaseLost
from post_training.jobs.store import JobStore
from post_training.training.interruption import Interrupted
from post_training.worker import warmth
from post_training.worker.keeping import clean, discard_unannounced, release_room
from post_training.worker.lease import Lease
from post_training.worker.reading import read_rows

logger = logging.getLogger(__name__)

LOST_EXIT_CODE = 3


def main() -> int:
    parser = argparse.ArgumentParser(description="Run attempts of jobs.")
    parser.add_argument("--home", type=Path, required=True)
    home: Path = parser.parse_args().home
    level = os.environ.get("LOG_LEVEL", "INFO").upper()
    orders = warmth.Orders()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    order = orders.first()
    while order is not None:
        try:
            fit = run(order, home)
        except LeaseLost as error:
            why = f"({error.message}); nothing was written"
            logger.warning("job %s is not this worker's any more %s", order.job_uuid, why)
            return LOST_EXIT_CODE
        order = orders.next(order.warm_seconds) if fit else None
    return 0


def run(order: Order, home: Path) -> bool:
    """Run the attempt that was ordered. Returns whether this process is fit for another job; raises LeaseLost."""
    warmth.begin_imports(order.model_module)
    database = Database(order.database_url)
    try:
        with Lease(JobStore(database), order.job_uuid, order.owner) as lease:
            fit = attempt(lease, home, order.device)
            warmth.exit_on_sigterm()  # before the look: one that came meanwhile was meant for the whole worker
            return fit and lease.stop_reason != "stopped"
    finally:
        database.close()


def attempt(lease: Lease, home: Path, device: str | None = None, free: FreeBytes = free_bytes) -> bool:
    """Run the job and store the attempt's end.

    Args:
        device, free: see `run_job`.

    Returns:
        whether this process is as good as a new one after it: nothing happened that nobody foresaw.

    Raises:
        LeaseLost: the job is another's, or the store could not be reached while the lease held.
    """
    fit = True
    try:
        try:
            clean(lease, home)
            hold_reserve(checkpoints_root(home, lease.job_uuid))
            _run(lease, home, device, free)
        except (Interrupted, LeaseLost):
            raise
        except Exception as error:
            known = _known(error)
            fit = known is not None and not isinstance(known, OutOfMemory)
            _fail(lease, home, error)
    except Interrupted:
        fit = _store_interruption(lease, home) and fit
    return fit


def _run(lease: Lease, home: Path, device: str | None, free: FreeBytes) -> None:
    spec = _spec(lease)
    # torch only then: it takes seconds to import, in which rows are read, the lease must beat and a stop be heard.
    if spec.session is not None:
        warmth.wait_for_imports()
        from post_training.worker.session_loop import run_session

        run_session(lease, spec, home, device=device, free=free)
        return
    data = read_rows(lease, spec, home)
    warmth.wait_for_imports()
    from post_training.worker.job_loop import run_job

    run_job(lease, data, home, device=device, free=free)


def _spec(lease: Lease) -> JobSpec:
    return JobSpec.model_validate(lease.store.get(lease.job_uuid).spec)


def _store_interruption(lease: Lease, home: Path) -> bool:
    """As `attempt`."""
    if lease.stop_reason == "lost":
        raise LeaseLost("the lease is over")
    release_room(lease, home)
    lease.confirm()  # a cancel may have come since the last look
    if lease.stop_reason == "cancelled":
        discard_unannounced(lease, home)
        lease.finish(JobStatus.cancelled, "cancelled while running")
        return True
    clean(lease, home)
    lease.finish(JobStatus.scheduled, "the server stopped; the job waits for its next start")
    return False


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
        from post_training.worker.announcing import rescue

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
    code = main()
    # At once: nothing is left to be done, and a thread may still be importing.
    logging.shutdown()
    os._exit(code)
