"""What a provider says of itself, and what it is given.

A provider is a module with `async def get_provider_impl(config, deps) -> impl`. `impl` fulfils its API's Protocol and
may have `async def start()` (called once the whole stack is built) and `async def shutdown()`.
docs/writing-a-provider.md says more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from apis.common import Api
from apis.errors import ProviderInvalid
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog
from post_training.jobs.database import Database
from post_training.jobs.scheduler import Scheduler

SPEC_VERSION = 1
"""Goes up whenever a provider that was written for the version before would not work any more."""


class ProviderSpec(BaseModel):
    """One kind of provider.

    Attributes:
        spec_version: the `SPEC_VERSION` it was written for; left out: the first.
        provider_type: `inline::<name>` or `remote::<name>`, as a run.yaml names it.
        module: import path of the module with `get_provider_impl`; must import without torch.
        config_class: import path of the pydantic model its `config:` is checked against.
        api_dependencies: APIs that must be configured and are built first.
        pip_packages: what must be installed for it.
        capabilities: what it can do, for `postgrad stack list-providers`: the verbs of its API, then the rest.
        model_types: the models that it computes, by `model_type` of their config.json; empty: that is not how it tells.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    spec_version: int = 1
    api: Api
    provider_type: str
    module: str
    config_class: str
    api_dependencies: tuple[Api, ...] = ()
    optional_api_dependencies: tuple[Api, ...] = ()
    description: str = ""
    pip_packages: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()


def check_spec_version(provider_type: object, found: object) -> None:
    """Raises ProviderInvalid unless the version that was found is this Postgrad's."""
    if found != SPEC_VERSION:
        raise ProviderInvalid(
            f"{provider_type} was written for spec version {found}, this Postgrad has {SPEC_VERSION}; "
            "get a release of it for that version"
        )


@dataclass(frozen=True)
class ProviderDeps:
    """What a provider is built from.

    Attributes:
        provider_id: the id this instance has in the run.yaml.
        home: the state folder; everything a provider writes lies under it.
        database: the one store.
        models, datasets: the stack's catalogs.
        scheduler: runs the jobs of all providers on the stack's devices.
        apis: implementations of the APIs named as dependencies; a list for datasetio, of which there may be several.
    """

    provider_id: str
    home: Path
    database: Database
    models: ModelCatalog
    datasets: DatasetCatalog
    scheduler: Scheduler
    apis: Mapping[Api, Any]
