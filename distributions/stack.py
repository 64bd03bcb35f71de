"""A built stack: its store, catalogs and providers, started and shut down together."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import anyio
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

# Imported for its tables, which must be known before the store makes what is missing.
import post_training.jobs.tables  # noqa: F401
from apis.common import Api
from apis.datasets.models import RegisterDatasetRequest
from apis.errors import Conflict, ModelNotFound, PostgradError, RunConfigInvalid, StackError
from apis.models.models import RegisterModelRequest
from distributions.home import ensure_home, lock_home
from distributions.provider_choice import choose_among
from distributions.resolver import BuiltProvider, PlannedProvider, build
from distributions.run_config import ModelEntry, StackRunConfig
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog
from post_training.job_files import finish_deletions
from post_training.jobs.database import Database, SchemaRow, store_error
from post_training.jobs.scheduler import Scheduler, local_scheduler
from post_training.jobs.store import JobStore
from post_training.owners import STACK, acting_as
from providers.registry import ALIASES

log = logging.getLogger(__name__)

PROVIDER_SHUTDOWN_SECONDS = 20
STORE_ANSWER_SECONDS = 5.0


@dataclass
class Stack:
    """A built stack. `start` and `shutdown` may each be called more than once; only the first call acts."""

    config: StackRunConfig
    database: Database
    models: ModelCatalog
    datasets: DatasetCatalog
    scheduler: Scheduler
    lock: IO[str]
    providers: list[BuiltProvider]
    _started: list[BuiltProvider] = field(default_factory=list)
    _running: bool = False

    def impl(self, api: Api) -> Any | None:
        """The implementation of `api`, None where the stack does not serve it; of several providers, one for all."""
        if not self.config.serves(api):
            return None
        found = {b.planned.provider_id: b.impl for b in self.providers if b.planned.api is api}
        if api is Api.post_training and len(found) > 1:
            return choose_among(found)
        return next(iter(found.values()), None)

    async def store_answers(self) -> bool:
        """Whether the store can be read now, within a few seconds."""
        with anyio.move_on_after(STORE_ANSWER_SECONDS):
            return await anyio.to_thread.run_sync(_reads, self.database, abandon_on_cancel=True)
        return False

    async def start(self) -> None:
        """Start every provider, dependencies first; on a failure those already started are shut down."""
        if self._running:
            return
        self._running = True
        try:
            for built in self.providers:
                self._started.append(built)
                await _start(built)
            if self.scheduler.provider_ids and self.config.serves(Api.post_training):
                await anyio.to_thread.run_sync(finish_deletions, self.config.home, JobStore(self.database))
                self.scheduler.start()
        except BaseException:
            await self.shutdown()
            raise

    def end_streams(self) -> None:
        """End the answers that would go on for as long as their reader stays. Call it in the event loop."""
        for built in self.providers:
            if hasattr(built.impl, "end_streams"):
                built.impl.end_streams()

    async def shutdown(self) -> None:
        """Shut every started provider down, last started first. One that fails or hangs does not keep the others up."""
        await anyio.to_thread.run_sync(self.scheduler.stop)
        while self._started:
            built = self._started.pop()
            if not hasattr(built.impl, "shutdown"):
                continue
            try:
                async with asyncio.timeout(PROVIDER_SHUTDOWN_SECONDS):
                    await built.impl.shutdown()
            except Exception:  # whatever a provider does, the rest must still be shut down
                log.exception("provider %s did not shut down cleanly", built.planned.provider_id)
        if self._running:
            self._running = False
            self.database.close()
            self.lock.close()


def _reads(database: Database) -> bool:
    try:
        with database.reading() as session:
            return session.scalar(select(SchemaRow.version)) is not None
    except (SQLAlchemyError, OSError) as error:
        known = store_error(error) if isinstance(error, SQLAlchemyError) else None
        log.error("the store does not answer: %s", known.message if known else type(error).__name__)
        return False


async def _start(built: BuiltProvider) -> None:
    if not hasattr(built.impl, "start"):
        return
    try:
        await built.impl.start()
    except PostgradError:
        raise
    except Exception as error:  # whatever a provider does, the command line says which one it was
        what = f"{built.planned.path}: provider {built.planned.provider_id} did not start"
        raise StackError(f"{what}: {type(error).__name__}: {error}") from error


async def build_stack(config: StackRunConfig, planned: Sequence[PlannedProvider]) -> Stack:
    """Open the store and make every provider; register what the run.yaml lists.

    Raises:
        StackError: the store cannot be opened, or a provider cannot be built. A state folder made by this call is
            removed again.
        RunConfigInvalid: a listed model or data set cannot be registered.
    """
    made_home = ensure_home(config.home)
    lock = lock_home(config.home)
    database: Database | None = None
    try:
        database = _open_store(config)
        models = ModelCatalog(database, config.home)
        datasets = DatasetCatalog(database, config.home)
        datasets.discard_unfinished()
        scheduler = local_scheduler(database, config.home, config.jobs.settings(config.environ))
        providers = await build(planned, database, models, datasets, scheduler, config)
        stack = Stack(config, database, models, datasets, scheduler, lock, providers)
        with acting_as(STACK):
            await _register_listed(stack)
        return stack
    except BaseException:
        if database is not None:
            database.close()
        lock.close()
        if made_home:
            shutil.rmtree(config.home, ignore_errors=True)
        raise


def _open_store(config: StackRunConfig) -> Database:
    store = config.metadata_store
    database: Database | None = None
    try:
        if store.type == "sqlite" and store.db_path:
            Path(store.db_path).parent.mkdir(parents=True, exist_ok=True)
        database = Database(store.sqlalchemy_url(config.home))
        database.migrate()
        return database
    except (StackError, OSError) as error:
        if database is not None:
            database.close()
        said = error.message if isinstance(error, StackError) else f"its folder cannot be made: {error.strerror}"
        raise StackError(f"metadata_store: {said}") from error


async def _register_listed(stack: Stack) -> None:
    ids = {built.planned.provider_id for built in stack.providers}
    for index, model in enumerate(stack.config.models):
        if model.provider_id and model.provider_id not in ids:
            log.warning("models.%d: %s: no provider %s is configured", index, model.model_id, model.provider_id)
            continue
        with _naming(f"models.{index}"):
            try:
                await stack.models.register_model(RegisterModelRequest(**model.model_dump()))
            except Conflict as error:
                log.warning("models.%d: the stored one stays: %s", index, error.message)
            except ModelNotFound as error:
                if not _of_llama_stack(stack.config, model):
                    raise
                how = "the server runs without it; `postgrad models import FOLDER --model-id ID` brings it in"
                log.warning("models.%d: %s: %s", index, error.message, how)
    for index, dataset in enumerate(stack.config.datasets):
        if dataset.provider_id and dataset.provider_id not in ids:
            log.warning("datasets.%d: %s: no provider %s is configured", index, dataset.dataset_id, dataset.provider_id)
            continue
        with _naming(f"datasets.{index}"):
            request = RegisterDatasetRequest(**dataset.model_dump(exclude={"provider_id"}))
            try:
                await stack.datasets.register_dataset(request, provider_id=dataset.provider_id or None)
            except Conflict as error:
                # Editing the file must not keep the server down, where alone the old one could be unregistered.
                log.warning("datasets.%d: the stored one stays: %s", index, error.message)


def _of_llama_stack(config: StackRunConfig, model: ModelEntry) -> bool:
    """Whether a model is listed for a provider under Llama Stack's name: its files lie where that server had them."""
    entries = [entry for entry in config.providers.get(Api.inference, []) if entry.enabled]
    named = [entry for entry in entries if model.provider_id in (None, "", entry.provider_id)]
    return any((Api.inference, entry.provider_type) in ALIASES for entry in named)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except PostgradError as error:
        raise RunConfigInvalid(f"{path}: {error.message}", param=path) from error
