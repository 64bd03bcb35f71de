"""The model catalog: base models, checkpoints and other names for them, in one name space.

`resolve` is the one place that turns a model id into files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import anyio.to_thread
from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from apis.common import MAX_IDENTIFIER_LENGTH, check_identifier
from apis.errors import Conflict, InvalidField, ModelInvalid, ModelNotFound
from apis.models.models import ListModelsResponse, Model, RegisterModelRequest
from post_training.catalog.aliases import same_model
from post_training.catalog.folders import forget_imported, imported_models
from post_training.catalog.model_tables import AliasRow, BaseModelRow, CheckpointModelRow
from post_training.checkpoints.layout import ADAPTER, MERGED
from post_training.jobs.database import Database, now
from post_training.jobs.tables import JobRow
from post_training.owners import EVERYBODY, STACK, check_changeable, current_caller, is_own, is_visible, visible

_LATEST = re.compile(r"(?P<model>.+)-(?P<kind>sft|dpo)-(?P<epoch>[0-9]{1,9})")
_SHOWN_IDS = 5
_T = TypeVar("_T")
_Model: TypeAlias = BaseModelRow | CheckpointModelRow
_Named: TypeAlias = _Model | AliasRow
_Row = TypeVar("_Row", bound=_Named)


@dataclass(frozen=True)
class ResolvedModel:
    """A model as files.

    Attributes:
        identifier: the model's own id, whichever of its names was asked for.
        base_identifier, base_dir: the base model under it, a Hugging Face directory.
        adapter_dir: PEFT adapter on that base; None for a base model.
        merged_dir: the whole model in one directory, where the checkpoint holds it.
    """

    identifier: str
    base_identifier: str
    base_dir: Path
    adapter_dir: Path | None
    merged_dir: Path | None


def checkpoint_identifier(model: str, job: str, epoch: int, kind: str = "sft") -> str:
    """`<model>-<kind>-<job>-<epoch>`, the model id of a job's checkpoint after `epoch` (from 0).

    Raises:
        InvalidField: it would be longer than an id may be.
    """
    identifier = f"{model}-{kind}-{job}-{epoch}"
    if len(identifier) > MAX_IDENTIFIER_LENGTH:
        raise InvalidField(
            f"checkpoints would be called {identifier[:40]}…, {len(identifier)} characters; an id has at most "
            f"{MAX_IDENTIFIER_LENGTH}: choose a shorter job_uuid, or give the model a shorter id",
            param="job_uuid",
        )
    return check_identifier(identifier, param="job_uuid")


class ModelCatalog:
    """Implements `apis.models.Models`, and what the job side needs: `resolve` and the bookkeeping of checkpoints.

    Args:
        provider_id: what the models API says provides these models where a registration named nothing else.
    """

    def __init__(self, database: Database, home: Path, provider_id: str = "postgrad") -> None:
        self.database = database
        self.home = home
        self._provider_id = provider_id

    # -- the models API ------------------------------------------------------------------------------------------

    async def list_models(self) -> ListModelsResponse:
        return await _in_thread(self._list)

    async def get_model(self, model_id: str) -> Model:
        return await _in_thread(partial(self._get, model_id))

    async def register_model(self, request: RegisterModelRequest) -> Model:
        """Give a known model another id; metadata of a known id is updated. Raises ModelNotFound, Conflict."""
        return await _in_thread(partial(self._register, request))

    async def unregister_model(self, model_id: str) -> None:
        """Forget the id; files stay. Raises ModelNotFound, Conflict where other ids stand for it."""
        await _in_thread(partial(self._unregister, model_id))

    # -- for jobs and inference ----------------------------------------------------------------------------------

    def resolve(self, identifier: str) -> ResolvedModel:
        """Find a model's files by any of its names.

        In this order: an exact id; a registered other name; the other names of a Llama model (SKU or hub id);
        `<model>-sft-<epoch>`, which is that epoch's checkpoint of the newest completed job on the model.

        Raises:
            ModelNotFound: no model has that name.
            ModelInvalid: its files are gone.
        """
        return self._resolved(self._found(identifier))

    def add_base(self, session: Session, identifier: str, directory: Path, details: dict[str, Any]) -> None:
        """Record a base model. The same again is a no-op. Raises Conflict where the id is taken."""
        folder = self._relative(directory)
        known = session.get(BaseModelRow, identifier)
        if known is None:
            self._refuse_taken(session, identifier)
            session.add(BaseModelRow(identifier=identifier, folder=folder, details=details, created_at=now()))
        elif known.folder != folder:
            raise Conflict(f"model {identifier!r} is another directory already: choose another id", param="model_id")

    def add_checkpoint(
        self,
        session: Session,
        *,
        identifier: str,
        job_uuid: str,
        epoch: int,
        step: int,
        directory: Path,
        model: str,
        base_identifier: str,
        base_dir: Path,
        kind: str = "sft",
        details: dict[str, Any] | None = None,
    ) -> None:
        """Record a verified checkpoint within the caller's transaction. The same job may record it again.

        Args:
            model: the id the job was asked to train.
            directory: the checkpoint directory; it must lie in the home folder.

        Raises:
            Conflict: the id belongs to something else.
        """
        known = session.get(CheckpointModelRow, identifier)
        if known is not None and known.job_uuid == job_uuid:
            session.delete(known)
            session.flush()
        else:
            self._refuse_taken(session, identifier)
        session.add(
            CheckpointModelRow(
                identifier=identifier,
                job_uuid=job_uuid,
                model=model,
                kind=kind,
                epoch=epoch,
                step=step,
                folder=self._relative(directory),
                base_identifier=base_identifier,
                base_folder=self._relative(base_dir),
                details=details or {},
                created_at=now(),
                owned_by=session.scalar(select(JobRow.owned_by).where(JobRow.job_uuid == job_uuid)),
            )
        )

    def refuse_taken(self, identifiers: Iterable[str]) -> None:
        """Raises Conflict where a model, checkpoint or other name has one of `identifiers`."""
        wanted = list(identifiers)
        with self.database.reading() as session:
            for kind in (BaseModelRow, CheckpointModelRow, AliasRow):
                taken = session.scalar(select(func.min(kind.identifier)).where(kind.identifier.in_(wanted)))
                if taken is not None:
                    raise Conflict(
                        f"a checkpoint of this job would be called {taken!r}, which is taken: choose another job_uuid",
                        param="job_uuid",
                    )

    def refuse_hidden(self, identifier: str) -> None:
        """Raises Conflict where somebody has this id, whether or not the caller may see what it is."""
        with self.database.reading() as session:
            self._refuse_taken(session, identifier)

    def mark_job_completed(self, session: Session, job_uuid: str) -> None:
        """From now on `<model>-sft-<epoch>` may mean this job's checkpoints."""
        rows = update(CheckpointModelRow).where(CheckpointModelRow.job_uuid == job_uuid)
        session.execute(rows.values(completed_at=now()))

    def remove_job(self, session: Session, job_uuid: str) -> None:
        """Forget a job's checkpoints and the names given to them; files stay."""
        ids = select(CheckpointModelRow.identifier).where(CheckpointModelRow.job_uuid == job_uuid)
        session.execute(delete(AliasRow).where(AliasRow.target.in_(ids)))
        session.execute(delete(CheckpointModelRow).where(CheckpointModelRow.job_uuid == job_uuid))

    def directory(self, folder: str) -> Path:
        """A stored folder as a path."""
        return self.home / folder  # an absolute one stays as it is

    # -- in a thread ---------------------------------------------------------------------------------------------

    def _list(self) -> ListModelsResponse:
        if self._unrecorded():
            with self.database.session() as session:
                self._discover(session)
        with self.database.reading() as session:
            rows = [*_by_time(session, BaseModelRow), *_by_time(session, CheckpointModelRow)]
            aliases: list[AliasRow] = _by_time(session, AliasRow)
            targets = {alias.identifier: self._lookup(session, alias.identifier) for alias in aliases}
        models = [self._model(row.identifier, row) for row in rows]
        for alias in aliases:
            if (target := targets[alias.identifier]) is not None:
                models.append(self._model(alias.identifier, target, alias))
        return ListModelsResponse(data=models)

    def _get(self, model_id: str) -> Model:
        row = self._found(model_id, "model_id")
        with self.database.reading() as session:
            alias = _seen(session.get(AliasRow, model_id))
        return self._model(model_id, row, alias)

    def _register(self, request: RegisterModelRequest) -> Model:
        if request.model_type == "embedding":
            raise InvalidField("only models of type llm can be registered here", param="model_type")
        if not isinstance((request.metadata or {}).get("provider_id", ""), str):
            raise InvalidField("must be a string", param="metadata.provider_id")
        given = {**(request.metadata or {}), **({"provider_id": request.provider_id} if request.provider_id else {})}
        target = request.provider_model_id or request.model_id
        with self.database.session() as session:
            row = self._find(session, target, "provider_model_id" if request.provider_model_id else "model_id")
            if self._is_own_newest(session, request.model_id, target, row):
                return self._model(request.model_id, row)
            record = self._record(session, request.model_id, target, row)
            details = {**record.details, **given}
            if details != record.details:
                check_changeable(_owner(record), f"model {request.model_id!r}")
                record.details = details
            alias = record if isinstance(record, AliasRow) else None
        return self._model(request.model_id, row, alias)

    def _record(self, session: Session, identifier: str, target: str, row: _Model) -> _Named:
        """The row that `identifier` has or now gets."""
        taken: _Named | None = session.get(AliasRow, identifier) or _exact(session, identifier)
        if taken is not None and _seen(taken) is None:
            raise _taken_id(identifier)
        stands_for = taken.target if isinstance(taken, AliasRow) else identifier
        if taken is not None and stands_for not in (target, row.identifier):
            raise Conflict(
                f"model id {identifier!r} is taken, it stands for {stands_for}: unregister it first, "
                "or choose another id",
                param="model_id",
            )
        if taken is None:
            _refuse_of_others_jobs(session, identifier)
            stored = identifier if target == identifier else row.identifier
            taken = AliasRow(identifier=identifier, target=stored, details={}, created_at=now())
            taken.owned_by = current_caller().owner
            session.add(taken)
        elif current_caller() is STACK and not isinstance(taken, BaseModelRow):
            taken.owned_by = EVERYBODY
        return taken

    def _is_own_newest(self, session: Session, identifier: str, target: str, row: _Model) -> bool:
        """Whether a name that somebody else gave means the caller's own newest checkpoint to the caller, as asked."""
        taken = session.get(AliasRow, identifier)
        if taken is None or _seen(taken) is not None or target not in (identifier, row.identifier):
            return False
        return self._newest(session, identifier) is row

    def _unregister(self, model_id: str) -> None:
        with self.database.session() as session:
            self._discover(session)
            row: _Named | None = _seen(session.get(AliasRow, model_id)) or _seen(_exact(session, model_id))
            if row is None:
                raise self._not_found(session, model_id, "model_id")
            check_changeable(_owner(row), f"model {model_id!r}")
            others = list(session.scalars(select(AliasRow).where(AliasRow.target == model_id)))
            if not isinstance(row, AliasRow) and others:
                named = ", ".join(alias.identifier for alias in others if _seen(alias)) or "another name"
                raise Conflict(f"{named} stands for {model_id!r}: unregister that first", param="model_id")
            session.delete(row)
        if isinstance(row, BaseModelRow):
            forget_imported(self.home, model_id)

    # -- finding -------------------------------------------------------------------------------------------------

    def _found(self, identifier: str, param: str = "model") -> _Model:
        """As `_find`. The writers' lock is taken only to record a model that was imported meanwhile."""
        with self.database.reading() as session:
            row = self._lookup(session, identifier)
        if row is not None:
            return row
        with self.database.session() as session:
            return self._find(session, identifier, param)

    def _unrecorded(self) -> bool:
        """Whether models were imported that the store does not know."""
        with self.database.reading() as session:
            return any(not self._taken(session, identifier) for identifier in imported_models(self.home))

    def _find(self, session: Session, identifier: str, param: str) -> _Model:
        """Raises ModelNotFound, which names `param`."""
        row = self._lookup(session, identifier)
        if row is None and self._discover(session):
            row = self._lookup(session, identifier)
        if row is None:
            raise self._not_found(session, identifier, param)
        return row

    def _lookup(self, session: Session, identifier: str) -> _Model | None:
        alias = _seen(session.get(AliasRow, identifier))
        named = None
        if alias is not None and alias.target != identifier:
            target = _exact(session, alias.target)
            # Under a name that is everybody's, everybody has the model, a job's as well.
            named = target if alias.owned_by == EVERYBODY else _seen(target)
            if current_caller().owner == alias.owned_by or alias.owned_by == EVERYBODY:
                return named
        # A name that a key gave means something to the administrator only where nothing else has it.
        for name in (identifier, *same_model(identifier)):
            if (row := _seen(_exact(session, name))) is not None:
                return row
        return self._newest(session, identifier) or named

    def _newest(self, session: Session, identifier: str) -> CheckpointModelRow | None:
        match = _LATEST.fullmatch(identifier)
        # The length, since each `-sft-<n>` at the end is another round of this recursion.
        if match is None or len(identifier) > MAX_IDENTIFIER_LENGTH:
            return None
        names = set(same_model(match["model"]))
        if (row := self._lookup(session, match["model"])) is not None:
            names |= {row.identifier, *same_model(row.identifier)}
        found = (
            select(CheckpointModelRow)
            .where(CheckpointModelRow.model.in_(names), CheckpointModelRow.kind == match["kind"])
            .where(CheckpointModelRow.epoch == int(match["epoch"]), CheckpointModelRow.completed_at.is_not(None))
            .where(visible(CheckpointModelRow.owned_by))
            # The administrator, who sees all, means those of no key first.
            .order_by(CheckpointModelRow.owned_by.is_distinct_from(current_caller().owner))
            .order_by(CheckpointModelRow.completed_at.desc(), CheckpointModelRow.step.desc())
        )
        return session.scalars(found.limit(1)).first()

    def _discover(self, session: Session) -> bool:
        """Record models that `postgrad models import` put into the home folder; whether there were any."""
        new = [
            (identifier, directory)
            for identifier, directory in imported_models(self.home).items()
            if not self._taken(session, identifier)
        ]
        for identifier, directory in new:
            self.add_base(session, identifier, directory, {})
        session.flush()
        return bool(new)

    def _resolved(self, row: _Model) -> ResolvedModel:
        if isinstance(row, BaseModelRow):
            base = _checked(row.identifier, self.directory(row.folder), "config.json")
            return ResolvedModel(row.identifier, row.identifier, base, None, None)
        folder = self.directory(row.folder)
        merged = folder / MERGED
        if merged.is_dir() and not (folder / ADAPTER).is_dir():  # every weight was trained: a model by itself
            whole = _checked(row.identifier, merged, "config.json")
            return ResolvedModel(row.identifier, row.identifier, whole, None, None)
        base = _checked(row.base_identifier, self.directory(row.base_folder), "config.json")
        adapter = _checked(row.identifier, folder / ADAPTER, "adapter_config.json")
        return ResolvedModel(row.identifier, row.base_identifier, base, adapter, merged if merged.is_dir() else None)

    def _model(self, identifier: str, row: _Model, alias: AliasRow | None = None) -> Model:
        details = {**row.details, **(alias.details if alias else {})}
        provider_id = details.pop("provider_id", self._provider_id)
        if isinstance(row, CheckpointModelRow):
            details |= {"base_model": row.base_identifier, "job_uuid": row.job_uuid}
            details |= {"epoch": row.epoch, "step": row.step}
        return Model(
            identifier=identifier,
            provider_resource_id=row.identifier,
            provider_id=provider_id,
            metadata=details,
            id=identifier,
            created=int((alias or row).created_at.timestamp()),
            # Where clients from 0.4 on look for these.
            custom_metadata={
                **details,
                "model_type": "llm",
                "provider_id": provider_id,
                "provider_resource_id": row.identifier,
            },
        )

    def _relative(self, directory: Path) -> str:
        directory, home = directory.resolve(), self.home.resolve()
        return directory.relative_to(home).as_posix() if directory.is_relative_to(home) else str(directory)

    def _taken(self, session: Session, identifier: str) -> bool:
        return _exact(session, identifier) is not None or session.get(AliasRow, identifier) is not None

    def _refuse_taken(self, session: Session, identifier: str) -> None:
        if self._taken(session, identifier):
            raise _taken_id(identifier)

    def _not_found(self, session: Session, identifier: str, param: str) -> ModelNotFound:
        ids = [
            *session.scalars(select(BaseModelRow.identifier)),
            *session.scalars(select(CheckpointModelRow.identifier).where(visible(CheckpointModelRow.owned_by))),
        ]
        known = ", ".join(ids[:_SHOWN_IDS]) + (f" and {len(ids) - _SHOWN_IDS} more" if len(ids) > _SHOWN_IDS else "")
        return ModelNotFound(
            f"there is no model {identifier!r}; there is {known or 'none yet'}. "
            "Add one with `postgrad models import <folder or hub id>`",
            param=param,
        )


def _exact(session: Session, identifier: str) -> _Model | None:
    return session.get(BaseModelRow, identifier) or session.get(CheckpointModelRow, identifier)


def _seen(row: _Row | None) -> _Row | None:
    """`row`, where the caller may see it."""
    return row if row is not None and is_visible(_owner(row)) else None


def _owner(row: _Named) -> str | None:
    return EVERYBODY if isinstance(row, BaseModelRow) else row.owned_by


def _taken_id(identifier: str) -> Conflict:
    return Conflict(f"model id {identifier!r} is taken: choose another one", param="model_id")


def _refuse_of_others_jobs(session: Session, identifier: str) -> None:
    """Raises Conflict for a name that a checkpoint of another caller's job may be about to get."""
    if current_caller().sees_all:
        return
    tails = [identifier[match.end() :] for match in re.finditer("(?=-(?:sft|dpo)-)", identifier)]
    jobs = {tail[len("-sft-") :].rpartition("-")[0] for tail in tails}
    owners = session.scalars(select(JobRow.owned_by).where(JobRow.job_uuid.in_(jobs)))
    if any(not is_own(owner) for owner in owners):
        raise _taken_id(identifier)


def _by_time(session: Session, kind: Any) -> list[Any]:
    """The rows that the caller may see."""
    query = select(kind).order_by(kind.created_at, kind.identifier)
    return list(session.scalars(query if kind is BaseModelRow else query.where(visible(kind.owned_by))))


def _checked(identifier: str, directory: Path, file: str) -> Path:
    if not (directory / file).is_file():
        raise ModelInvalid(f"the files of model {identifier!r} are gone ({file} is missing): import or train it again")
    return directory


async def _in_thread(work: Callable[[], _T]) -> _T:
    return await anyio.to_thread.run_sync(work)
