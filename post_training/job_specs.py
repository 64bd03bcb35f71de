"""From a request to the job that is stored: everything resolved and checked that can be at once.

A provider brings its own part, a `ProviderProfile`; the rest is the same for all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from apis.common import check_identifier
from apis.datasets.models import DATA_SOURCE
from apis.errors import DataInvalid, DatasetNotFound, InvalidField, ModelNotFound
from apis.post_training.models import (
    FullFinetuningConfig,
    RunnableAlgorithm,
    SupervisedFineTuneRequest,
    TrainingConfig,
)
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.folders import imported_models
from post_training.catalog.models import ModelCatalog, ResolvedModel, checkpoint_identifier
from post_training.data.preflight import check_rows
from post_training.data.sources import SourcePolicy, open_rows
from post_training.defaults import MAX_DEFAULT_EPOCHS, lr_of_all_weights
from post_training.jobs.database import now
from post_training.jobs.devices import Slot
from post_training.jobs.spec import DatasetRef, JobSpec, ModelRef, SessionSettings, WorkerSettings

CheckRequest = Callable[[SupervisedFineTuneRequest, ResolvedModel], RunnableAlgorithm]
"""Refuses what a provider cannot do, by field name; returns the algorithm it will run."""


@dataclass(frozen=True)
class ProviderProfile:
    """What a provider brings.

    Attributes:
        check: called before a job is accepted.
        default_lr: the learning rate of a LoRA job on this model whose request names none.
        worker: settings stored with each job.
        default_model: used where a request names none.
        default_seed: used where a request gives none.
        model_roots: folders that `checkpoint_dir` may point into.
    """

    provider_id: str
    check: CheckRequest
    default_lr: Callable[[ResolvedModel], float]
    worker: WorkerSettings
    default_model: str | None = None
    default_seed: int = 0
    model_roots: tuple[Path, ...] = ()


class SpecBuilder:
    """Makes the jobs of one provider.

    Args:
        slots: the devices that the stack has.
    """

    def __init__(
        self,
        home: Path,
        models: ModelCatalog,
        datasets: DatasetCatalog,
        profile: ProviderProfile,
        slots: Sequence[Slot],
    ) -> None:
        self._home = home
        self._models = models
        self._datasets = datasets
        self._profile = profile
        self._slots = slots

    def job(self, request: SupervisedFineTuneRequest) -> JobSpec:
        """The job that a request asks for.

        Raises:
            BadRequest, NotFound: a field, model or data set cannot be used.
        """
        self._refuse_other_provider(request.provider_id)
        _check_validation(request.training_config)
        data = request.training_config.data_config
        if data is None:
            raise InvalidField(
                "a job needs training_config.data_config with the dataset_id of a registered data set",
                param="training_config.data_config.dataset_id",
            )
        model = self._resolve_model(request)
        algorithm = self._profile.check(request, model)
        self._check_checkpoint_ids(model.identifier, request)
        dataset = self._check_dataset(data.dataset_id, request, "dataset_id")
        validation = (
            self._check_dataset(data.validation_dataset_id, request, "validation_dataset_id")
            if data.validation_dataset_id
            else None
        )
        return self._spec(request, model, algorithm, dataset, validation)

    def session(self, request: SupervisedFineTuneRequest, settings: SessionSettings) -> JobSpec:
        """The job of a session, whose rows its client brings. Raises as `job`."""
        self._refuse_other_provider(request.provider_id)
        model = self._resolve_model(request)
        algorithm = self._profile.check(request, model)
        # Of the longest name that a checkpoint gets where its client gives none.
        check_identifier(f"{model.identifier}-sft-{request.job_uuid}-step{10**9}", param="job_id")
        spec = self._spec(request, model, algorithm, None, None)
        return spec.model_copy(update={"session": settings})

    def _spec(
        self,
        request: SupervisedFineTuneRequest,
        model: ResolvedModel,
        algorithm: RunnableAlgorithm,
        dataset: DatasetRef | None,
        validation: DatasetRef | None,
    ) -> JobSpec:
        seed = request.training_config.seed
        spec = JobSpec(
            job_uuid=request.job_uuid,
            created_at=now(),
            provider_id=self._profile.provider_id,
            model=ModelRef(
                identifier=model.identifier,
                base_identifier=model.base_identifier,
                base_dir=str(model.base_dir),
                adapter_dir=str(model.adapter_dir) if model.adapter_dir else None,
            ),
            training_config=self._with_lr(request.training_config, algorithm, model),
            algorithm_config=algorithm,
            dataset=dataset,
            validation=validation,
            seed=self._profile.default_seed if seed is None else seed,
            worker=self._profile.worker,
        )
        self._check_device(spec)
        return spec

    def _refuse_other_provider(self, asked: str | None) -> None:
        if asked not in (None, self._profile.provider_id):
            raise InvalidField(
                f"there is no post_training provider {asked!r} here; there is {self._profile.provider_id!r}",
                param="provider_id",
            )

    def _check_device(self, spec: JobSpec) -> None:
        """Refuse now what would wait for ever."""
        slots = self._slots
        if not any(spec.device_kind in (None, slot.kind) for slot in slots):
            have = ", ".join(slot.name for slot in slots)
            raise InvalidField(
                f"no {spec.device_kind} device is configured here (`jobs.devices` of the run.yaml gives {have})",
                param="training_config.device",
            )

    def _with_lr(self, training: TrainingConfig, algorithm: RunnableAlgorithm, model: ResolvedModel) -> TrainingConfig:
        """Fixed now, so that every attempt has the same; what depends on the rows is settled where they are read."""
        optimizer = training.optimizer_config
        if optimizer.lr is not None:
            return training
        lr = self._profile.default_lr(model)
        if isinstance(algorithm, FullFinetuningConfig):
            lr = lr_of_all_weights(lr)
        filled = optimizer.model_copy(update={"lr": lr})
        return training.model_copy(update={"optimizer_config": filled})

    def _resolve_model(self, request: SupervisedFineTuneRequest) -> ResolvedModel:
        if request.checkpoint_dir:
            return self._at_directory(request.checkpoint_dir, request.model)
        identifier = request.model or self._profile.default_model
        if identifier is None:
            raise InvalidField(
                "no model named and the provider has no default_model; pass model, see `postgrad models list`",
                param="model",
            )
        return self._models.resolve(identifier)

    def _at_directory(self, checkpoint_dir: str, model: str | None) -> ResolvedModel:
        """The base model in a directory. Its id is `model`, else the one it was imported under, else its name."""
        directory = self._base_dir(checkpoint_dir)
        imported = {path.resolve(): identifier for identifier, path in imported_models(self._home).items()}
        identifier = imported.get(directory, directory.name)
        if model is not None and model != identifier:
            # Upstream's clients name the descriptor of what lies in the directory; another model's would mislabel it.
            known = self._known(model)
            if known is not None and (known.adapter_dir is not None or known.base_dir.resolve() != directory):
                raise InvalidField(
                    f"checkpoint_dir is {identifier!r}, but model {model!r} lies elsewhere; send one of the two",
                    param="checkpoint_dir",
                )
            identifier = model
        return ResolvedModel(check_identifier(identifier, param="checkpoint_dir"), identifier, directory, None, None)

    def _known(self, model: str) -> ResolvedModel | None:
        """The model of this id, None where there is none. Raises Conflict where it is another owner's."""
        try:
            return self._models.resolve(model)
        except ModelNotFound:
            self._models.refuse_hidden(model)
            return None

    def _base_dir(self, checkpoint_dir: str) -> Path:
        for root in self._profile.model_roots:
            # A NUL or an overlong name is no directory either.
            with contextlib.suppress(OSError, ValueError):
                directory = (root / checkpoint_dir).resolve()
                if directory.is_relative_to(root.resolve()) and directory.is_dir():
                    return directory
        raise InvalidField(
            f"{checkpoint_dir[:100]!r} is not a base-model directory under an allowed root "
            "(the provider's `model_roots`)",
            param="checkpoint_dir",
        )

    def _check_checkpoint_ids(self, model: str, request: SupervisedFineTuneRequest) -> None:
        """Refuse now what could only fail once an epoch is trained. Raises InvalidField, Conflict."""
        epochs = request.training_config.n_epochs or MAX_DEFAULT_EPOCHS
        checkpoint_identifier(model, request.job_uuid, epochs)
        self._models.refuse_taken(checkpoint_identifier(model, request.job_uuid, epoch) for epoch in range(epochs))

    def _check_dataset(self, dataset_id: str, request: SupervisedFineTuneRequest, field: str) -> DatasetRef:
        """Resolve a data set and check what can be checked at once: all rows of a small one, else the first.

        Raises:
            DatasetNotFound, DataInvalid: with `training_config.data_config.<field>` as their param.
        """
        assert request.training_config.data_config is not None  # _spec refused that
        try:
            reference = self._datasets.reference(dataset_id)
            reader = open_rows(
                DATA_SOURCE.validate_python(reference.source), SourcePolicy.model_validate(reference.policy)
            )
            data = request.training_config.data_config
            check_rows(reader, data.data_format, data.columns)
        except (DatasetNotFound, DataInvalid) as error:
            error.param = f"training_config.data_config.{field}"
            raise
        return reference


def _check_validation(training: TrainingConfig) -> None:
    """Refuse settings of a validation that contradict each other. Raises InvalidField."""
    data = training.data_config
    if data is None:
        return
    if data.validation_dataset_id and data.validation_split:
        raise InvalidField(
            "give a validation_dataset_id or a validation_split, not both",
            param="training_config.data_config.validation_split",
        )
    if training.early_stopping_patience and not (data.validation_dataset_id or data.validation_split):
        raise InvalidField(
            "stopping early needs a validation loss: give a validation_dataset_id or a validation_split",
            param="training_config.early_stopping_patience",
        )


def request_hash(request: BaseModel) -> str:
    """What tells whether two requests ask for the same: sha256 in hexadecimal."""
    # Without what equals a default, so that a field which a later version adds does not make a replay another request.
    body: dict[str, Any] = request.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
