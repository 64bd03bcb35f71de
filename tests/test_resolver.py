"""From a run.yaml to providers: order, loading, configuration, roles and compliance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from apis.common import Api
from apis.datasets.models import DataSource
from apis.errors import InvalidField, ProviderInvalid
from apis.inference import ChatCompletionRequest, CompletionRequest
from distributions.resolver import build, plan
from distributions.run_config import StackRunConfig
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog
from post_training.jobs.database import Database
from post_training.jobs.scheduler import local_scheduler
from providers.registry import ALIASES, BUILT_IN, find_spec, is_only_upstream
from providers.spec import ProviderDeps, ProviderSpec


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int = Field(1, ge=1)
    fail: str | None = None


class Source:
    """Reads nothing; fulfils `DatasetIO`."""

    def __init__(self, deps: ProviderDeps) -> None:
        self.deps = deps
        self.provider_id = deps.provider_id

    def accepts(self, source: DataSource) -> bool:
        return False

    def source_policy(self) -> dict[str, object]:
        return {}


class Incomplete:
    """Lacks, renames and over-demands what `Inference` promises."""

    async def chat_completion(self, body: ChatCompletionRequest) -> None: ...

    def completion(self, request: CompletionRequest) -> None: ...

    def stream_completion(self, request: CompletionRequest, extra: int) -> None: ...


class Complete:
    """Fulfils `Inference` with one optional parameter more."""

    def __init__(self, deps: ProviderDeps) -> None:
        self.deps = deps

    async def chat_completion(self, request: ChatCompletionRequest) -> None: ...

    def stream_chat_completion(self, request: ChatCompletionRequest) -> None: ...

    async def completion(self, request: CompletionRequest, extra: int = 0) -> None: ...

    def stream_completion(self, **anything: Any) -> None: ...


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ProviderSpec]:
    """Makes an importable provider module whose implementation is `make(deps)`."""

    def add(api: Api, name: str, make: Callable[[ProviderDeps], Any], **spec: Any) -> ProviderSpec:
        async def get_provider_impl(config: Config, deps: ProviderDeps) -> Any:
            if config.fail:
                raise RuntimeError(config.fail)
            return make(deps)

        module = ModuleType(f"provider_{name}")
        vars(module).update(get_provider_impl=get_provider_impl, Config=Config)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return ProviderSpec(
            api=api,
            provider_type=f"inline::{name}",
            module=module.__name__,
            config_class=f"{module.__name__}.Config",
            **spec,
        )

    return add


def stack_of(*entries: tuple[Api, dict[str, Any]]) -> StackRunConfig:
    providers: dict[str, list[dict[str, Any]]] = {}
    for api, entry in entries:
        providers.setdefault(api.value, []).append({"provider_id": "p", **entry})
    return StackRunConfig.model_validate({"providers": providers})


async def built(config: StackRunConfig, specs: list[ProviderSpec], home: Path) -> list[Any]:
    config._environ = {"POSTGRAD_HOME": str(home)}
    database = Database(f"sqlite:///{home}/store.db")
    database.migrate()
    try:
        models, datasets = ModelCatalog(database, home), DatasetCatalog(database, home)
        scheduler = local_scheduler(database, home)
        return [b.impl for b in await build(plan(config, specs), database, models, datasets, scheduler, config)]
    finally:
        database.close()


async def test_dependencies_are_built_first_and_handed_over(provider: Any, tmp_path: Path):
    specs = [
        provider(Api.inference, "writer", Complete, api_dependencies=(Api.datasetio, Api.models)),
        provider(Api.datasetio, "source", Source),
    ]
    config = stack_of(
        (Api.inference, {"provider_type": "inline::writer"}),
        (Api.datasetio, {"provider_type": "inline::source", "provider_id": "one"}),
        (Api.datasetio, {"provider_type": "inline::source", "provider_id": "two"}),
    )
    one, two, writer = await built(config, specs, tmp_path)
    assert writer.deps.apis[Api.datasetio] == [one, two]
    assert isinstance(writer.deps.apis[Api.models], ModelCatalog)
    assert set(writer.deps.apis) == {Api.datasetio, Api.models}
    assert (one.deps.provider_id, two.deps.provider_id, writer.deps.home) == ("one", "two", tmp_path)


def test_an_optional_dependency_orders_but_is_not_demanded(provider: Any):
    writer = provider(Api.inference, "writer", Complete, optional_api_dependencies=(Api.datasetio,))
    source = provider(Api.datasetio, "source", Source)
    alone = stack_of((Api.inference, {"provider_type": "inline::writer"}))
    assert [p.api for p in plan(alone, [writer, source])] == [Api.inference]
    both = stack_of(
        (Api.inference, {"provider_type": "inline::writer"}), (Api.datasetio, {"provider_type": "inline::source"})
    )
    assert [p.api for p in plan(both, [writer, source])] == [Api.datasetio, Api.inference]


def test_a_missing_dependency_is_named(provider: Any):
    writer = provider(Api.inference, "writer", Complete, api_dependencies=(Api.datasetio,))
    with pytest.raises(ProviderInvalid, match=r"providers\.inference\.0: inline::writer needs a provider of datasetio"):
        plan(stack_of((Api.inference, {"provider_type": "inline::writer"})), [writer])


def test_a_cycle_is_named(provider: Any):
    specs = [
        provider(Api.inference, "writer", Complete, api_dependencies=(Api.datasetio,)),
        provider(Api.datasetio, "source", Source, api_dependencies=(Api.inference,)),
    ]
    config = stack_of(
        (Api.inference, {"provider_type": "inline::writer"}), (Api.datasetio, {"provider_type": "inline::source"})
    )
    with pytest.raises(
        ProviderInvalid, match=r"inference -> datasetio -> inference|datasetio -> inference -> datasetio"
    ):
        plan(config, specs)


@pytest.mark.parametrize("api", [Api.inference])
def test_two_providers_in_one_role_are_refused_with_the_remedy(provider: Any, api: Api):
    spec = provider(api, "writer", Complete)
    entries = [(api, {"provider_type": "inline::writer", "provider_id": name}) for name in ("a", "b")]
    with pytest.raises(ProviderInvalid, match=r"a and b both claim .*__disabled__"):
        plan(stack_of(*entries), [spec])
    entries[0][1]["provider_id"] = "__disabled__"
    assert [(p.provider_id, p.path) for p in plan(stack_of(*entries), [spec])] == [("b", f"providers.{api.value}.1")]


def test_two_sources_need_different_ids(provider: Any):
    entries = [(Api.datasetio, {"provider_type": "inline::source"})] * 2
    with pytest.raises(ProviderInvalid, match="provider_id 'p'"):
        plan(stack_of(*entries), [provider(Api.datasetio, "source", Source)])


def test_an_unknown_type_is_answered_with_the_known_ones():
    with pytest.raises(ProviderInvalid, match=r"providers\.post_training\.0: .*'inline::torchtun'.*inline::torchtune"):
        plan(stack_of((Api.post_training, {"provider_type": "inline::torchtun"})))


def test_an_api_of_the_stacks_own_takes_no_provider():
    with pytest.raises(ProviderInvalid, match="served by the stack itself"):
        plan(stack_of((Api.models, {"provider_type": "inline::x"})))


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"size": 0}, r"providers\.inference\.0\.config\.size: "),
        ({"size": "big"}, r"providers\.inference\.0\.config\.size: "),
        ({"sise": 1}, r"providers\.inference\.0\.config\.sise: "),
    ],
)
def test_a_wrong_setting_is_named_by_its_dotted_path(provider: Any, config: dict[str, Any], place: str):
    spec = provider(Api.inference, "writer", Complete)
    with pytest.raises(ProviderInvalid, match=place):
        plan(stack_of((Api.inference, {"provider_type": "inline::writer", "config": config})), [spec])


def test_a_provider_that_does_not_import_is_named_with_the_cause():
    spec = ProviderSpec(
        api=Api.inference,
        provider_type="inline::gone",
        module="no_such_module",
        config_class="no_such_module.Config",
        pip_packages=("gone>=1",),
    )
    with pytest.raises(ProviderInvalid, match=r"inline::gone .*No module named 'no_such_module'; it needs: gone>=1"):
        plan(stack_of((Api.inference, {"provider_type": "inline::gone"})), [spec])


def test_a_spec_of_another_version_is_refused(provider: Any):
    spec = provider(Api.inference, "writer", Complete, spec_version=99)
    with pytest.raises(ProviderInvalid, match="spec version 99"):
        plan(stack_of((Api.inference, {"provider_type": "inline::writer"})), [spec])


async def test_everything_an_implementation_misses_is_listed(provider: Any, tmp_path: Path):
    spec = provider(Api.inference, "writer", lambda deps: Incomplete())
    with pytest.raises(ProviderInvalid) as caught:
        await built(stack_of((Api.inference, {"provider_type": "inline::writer"})), [spec], tmp_path)
    for fault in [
        "does not fulfil Inference",
        "method stream_chat_completion is missing",
        "chat_completion lacks the parameter 'request'",
        "chat_completion demands the parameter 'body'",
        "completion must be `async def`",
        "stream_completion demands the parameter 'extra'",
    ]:
        assert fault in caught.value.message


async def test_a_missing_attribute_is_listed(provider: Any, tmp_path: Path):
    class Nameless(Source):
        def __init__(self, deps: ProviderDeps) -> None:
            super().__init__(deps)
            del self.provider_id

    spec = provider(Api.datasetio, "source", Nameless)
    with pytest.raises(ProviderInvalid, match="attribute provider_id is missing"):
        await built(stack_of((Api.datasetio, {"provider_type": "inline::source"})), [spec], tmp_path)


async def test_a_provider_that_cannot_be_built_is_named_with_the_cause(provider: Any, tmp_path: Path):
    spec = provider(Api.inference, "writer", Complete)
    entry = {"provider_type": "inline::writer", "config": {"fail": "no disk"}}
    with pytest.raises(ProviderInvalid, match=r"providers\.inference\.0: .*RuntimeError: no disk"):
        await built(stack_of((Api.inference, entry)), [spec], tmp_path)


async def test_an_error_of_ours_from_a_provider_passes_as_it_is(provider: Any, tmp_path: Path):
    def refuse(deps: ProviderDeps) -> None:
        raise InvalidField("no", param="x")

    spec = provider(Api.inference, "writer", refuse)
    with pytest.raises(InvalidField):
        await built(stack_of((Api.inference, {"provider_type": "inline::writer"})), [spec], tmp_path)


@pytest.mark.parametrize(("alias", "ours"), ALIASES.items())
def test_upstreams_names_stand_for_our_providers_where_there_is_one(alias: tuple[Api, str], ours: str):
    if is_only_upstream(*alias):
        assert (alias[0], ours) not in {(spec.api, spec.provider_type) for spec in BUILT_IN}
    else:
        assert find_spec(*alias).provider_type == ours


@pytest.mark.parametrize("spec", BUILT_IN, ids=lambda spec: spec.provider_type)
def test_every_built_in_provider_loads_with_its_defaults(spec: ProviderSpec):
    needed = {"remote::llama-stack": {"url": "http://127.0.0.1:8322"}}.get(spec.provider_type, {})
    entries = [(spec.api, {"provider_type": spec.provider_type, "config": needed})]
    if Api.datasetio in spec.api_dependencies:
        entries.append((Api.datasetio, {"provider_type": "inline::localfs"}))
    assert spec.provider_type in [p.spec.provider_type for p in plan(stack_of(*entries))]
