"""From a run.yaml to running providers: which, in which order, and whether each keeps its API's promises.

`plan` looks at nothing but the configuration and the providers' code, so a faulty stack is refused before anything is
written. `build` makes the implementations.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pydantic import BaseModel, ValidationError

from apis.common import Api
from apis.datasets.protocol import DatasetIO
from apis.errors import PostgradError, ProviderInvalid
from apis.inference.protocol import Inference
from apis.post_training.protocol import PostTraining
from distributions.run_config import ProviderEntry, StackRunConfig
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog
from post_training.jobs.database import Database
from post_training.jobs.scheduler import Scheduler
from providers.external import Found, from_module, known, without_torch
from providers.registry import find_spec
from providers.spec import ProviderDeps, ProviderSpec, check_spec_version

log = logging.getLogger(__name__)

PROTOCOLS: dict[Api, type] = {
    Api.post_training: PostTraining,
    Api.datasetio: DatasetIO,
    Api.inference: Inference,
}
# Data sets pick their source by what it reads, jobs their trainer as `provider_choice` has it.
_SEVERAL_ALLOWED = frozenset({Api.datasetio, Api.post_training})
# The second is what Llama Stack's remote providers call it.
_FACTORIES = ("get_provider_impl", "get_adapter_impl")
# Served by the stack's own catalogs, so a provider may depend on them without anyone providing them.
_CATALOGS = frozenset({Api.datasets, Api.models})


@dataclass(frozen=True)
class PlannedProvider:
    """A provider whose code was found and whose configuration is right.

    Attributes:
        path: its dotted place in the run.yaml, such as `providers.post_training.0`.
    """

    api: Api
    provider_id: str
    path: str
    spec: ProviderSpec
    config: BaseModel
    factory: Any


@dataclass(frozen=True)
class BuiltProvider:
    planned: PlannedProvider
    impl: Any


def plan(config: StackRunConfig, specs: Sequence[ProviderSpec] | None = None) -> list[PlannedProvider]:
    """The providers that `config` switches on, dependencies first.

    Args:
        specs: the types that there are, beside those of a `module:`; None: the built-in ones, those of installed
            packages and those of `external_providers_dir`.

    Raises:
        ProviderInvalid: unknown type, another spec version, code that does not import, a wrong configuration (its
            dotted path is named), two providers in one role, a missing dependency, or a cycle.
    """
    found = known(config.external_providers_dir) if specs is None else Found(tuple(specs))
    for fault in found.faults:
        log.warning("%s", fault)
    planned = [
        _plan_one(api, entry, f"providers.{api.value}.{index}", found)
        for api, entries in config.providers.items()
        for index, entry in enumerate(entries)
        if entry.enabled
    ]
    _refuse_shared_roles(planned)
    return _ordered(planned)


def _plan_one(api: Api, entry: ProviderEntry, path: str, found: Found) -> PlannedProvider:
    try:
        spec = _spec(api, entry, found)
        check_spec_version(spec.provider_type, spec.spec_version)
        with without_torch(spec.module):
            config_class, factory = _code(spec)
    except ProviderInvalid as error:
        raise ProviderInvalid(f"{path}: {error.message}", param=path) from error.__cause__
    return PlannedProvider(api, entry.provider_id, path, spec, _configured(config_class, entry, path), factory)


def _code(spec: ProviderSpec) -> tuple[type[BaseModel], Any]:
    """The configuration class and the factory."""
    module, _, name = spec.config_class.rpartition(".")
    config_class = _attribute(spec, module, name)
    if not (isinstance(config_class, type) and issubclass(config_class, BaseModel)):
        raise ProviderInvalid(f"{spec.provider_type}: {spec.config_class} is no pydantic model")
    return config_class, _attribute(spec, spec.module, *_FACTORIES)


def _spec(api: Api, entry: ProviderEntry, found: Found) -> ProviderSpec:
    if entry.module:
        return from_module(entry.module, api, entry.provider_type)
    try:
        return find_spec(api, entry.provider_type, found.specs)
    except ProviderInvalid as error:
        is_known = any(spec.api is api and spec.provider_type == entry.provider_type for spec in found.specs)
        if is_known or not found.faults:
            raise
        raise ProviderInvalid(f"{error.message}; could not be loaded: {'; '.join(found.faults)}") from None


def _attribute(spec: ProviderSpec, module: str, *names: str) -> Any:
    """The first of `names` that the module has."""
    what = f"provider {spec.provider_type} cannot be loaded: {names[0]} of {module}"
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a provider's import may fail in any way
        needs = f"; it needs: {', '.join(spec.pip_packages)}" if isinstance(error, ImportError) else ""
        raise ProviderInvalid(f"{what}: {type(error).__name__}: {error}{needs}") from error
    for name in names:
        if hasattr(found, name):
            return getattr(found, name)
    raise ProviderInvalid(f"{what}: the module has none")


def _configured(config_class: type[BaseModel], entry: ProviderEntry, path: str) -> BaseModel:
    try:
        return config_class.model_validate(entry.config)
    except ValidationError as error:
        faults = [f"{'.'.join([path, 'config', *map(str, f['loc'])])}: {f['msg']}" for f in error.errors()]
    except PostgradError as error:
        faults = [f"{path}.config: {error.message}"]
    raise ProviderInvalid("; ".join(faults), param=f"{path}.config")


def _refuse_shared_roles(planned: Sequence[PlannedProvider]) -> None:
    for api in {p.api: None for p in planned}:
        ids = [p.provider_id for p in planned if p.api is api]
        if len(ids) > 1 and api not in _SEVERAL_ALLOWED:
            raise ProviderInvalid(
                f"providers.{api.value}: {' and '.join(ids)} both claim {api.value}, and no rule says which serves a "
                "request: remove one, or set its provider_id to __disabled__"
            )
        doubled = next((i for i in ids if ids.count(i) > 1), None)
        if doubled is not None:
            raise ProviderInvalid(f"providers.{api.value}: two providers have the provider_id {doubled!r}")


def _ordered(planned: Sequence[PlannedProvider]) -> list[PlannedProvider]:
    present = {p.api for p in planned}
    graph: dict[Api, set[Api]] = {p.api: set() for p in planned}
    for p in planned:
        missing = [api for api in p.spec.api_dependencies if api not in present | _CATALOGS]
        if missing:
            raise ProviderInvalid(
                f"{p.path}: {p.spec.provider_type} needs a provider of {', '.join(api.value for api in missing)}: "
                "add one under `providers:`"
            )
        graph[p.api].update(set(p.spec.api_dependencies + p.spec.optional_api_dependencies) & present)
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        ring = " -> ".join(api.value for api in error.args[1])
        raise ProviderInvalid(f"providers: each waits for the next to be built first: {ring}") from None
    return sorted(planned, key=lambda p: order.index(p.api))


async def build(
    planned: Sequence[PlannedProvider],
    database: Database,
    models: ModelCatalog,
    datasets: DatasetCatalog,
    scheduler: Scheduler,
    config: StackRunConfig,
) -> list[BuiltProvider]:
    """Make every implementation, in the order of `planned`, and attach the data sources to the catalog.

    Raises:
        ProviderInvalid: an implementation lacks methods of its API, or could not be made.
    """
    built: list[BuiltProvider] = []
    datasets.attach_sources([])
    for p in planned:
        apis = _apis(p, built, models, datasets)
        deps = ProviderDeps(p.provider_id, config.home, database, models, datasets, scheduler, apis)
        impl = await _instantiate(p, deps)
        check_compliance(p, impl)
        built.append(BuiltProvider(p, impl))
        if p.api is Api.datasetio:
            datasets.attach_sources([b.impl for b in built if b.planned.api is Api.datasetio])
    return built


def _apis(
    p: PlannedProvider, built: Sequence[BuiltProvider], models: ModelCatalog, datasets: DatasetCatalog
) -> dict[Api, Any]:
    found: dict[Api, Any] = {Api.models: models, Api.datasets: datasets}
    for b in built:
        if b.planned.api in _SEVERAL_ALLOWED:
            found.setdefault(b.planned.api, []).append(b.impl)
        else:
            found[b.planned.api] = b.impl
    wanted = set(p.spec.api_dependencies + p.spec.optional_api_dependencies)
    return {api: impl for api, impl in found.items() if api in wanted}


async def _instantiate(p: PlannedProvider, deps: ProviderDeps) -> Any:
    try:
        return await p.factory(p.config, deps)
    except PostgradError:
        raise
    except Exception as error:  # a provider's constructor may fail in any way
        raise ProviderInvalid(
            f"{p.path}: provider {p.spec.provider_type} could not be built: {type(error).__name__}: {error}"
        ) from error


def check_compliance(p: PlannedProvider, impl: object) -> None:
    """Hold `impl` against its API's Protocol: every attribute and method there, parameters under its names.

    Raises:
        ProviderInvalid: listing everything that is missing or differs.
    """
    promised_attributes = inspect.get_annotations(PROTOCOLS[p.api])
    faults = [f"attribute {name} is missing" for name in promised_attributes if not hasattr(impl, name)]
    for name, promised in inspect.getmembers(PROTOCOLS[p.api], inspect.isfunction):
        if not name.startswith("_"):
            faults += _differences(name, promised, getattr(impl, name, None))
    if faults:
        raise ProviderInvalid(
            f"{p.path}: {p.spec.provider_type} does not fulfil {PROTOCOLS[p.api].__name__}: {'; '.join(faults)}"
        )


def _differences(name: str, promised: Any, found: Any) -> list[str]:
    if not callable(found):
        return [f"method {name} is missing"]
    wanted = [p for p in inspect.signature(promised).parameters.values() if p.name != "self"]
    given = inspect.signature(found).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in given.values())
    faults = [f"{name} lacks the parameter {p.name!r}" for p in wanted if p.name not in given and not takes_any]
    extra = [p for p in given.values() if p.name not in {w.name for w in wanted}]
    faults += [
        f"{name} demands the parameter {p.name!r}, which its API does not have"
        for p in extra
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if inspect.iscoroutinefunction(promised) and not inspect.iscoroutinefunction(found):
        faults.append(f"{name} must be `async def`")
    return faults
