"""remote::huggingface: `huggingface://datasets/<org>/<name>?split=…`, read by a process of its own; nothing else."""

from __future__ import annotations

from apis.datasets.models import DataSource
from post_training.data.sources import SourcePolicy, is_hub_source
from providers.hub.config import HuggingfaceDatasetsConfig
from providers.spec import ProviderDeps


class HubDatasets:
    """Fulfils `apis.datasets.DatasetIO`."""

    def __init__(self, provider_id: str) -> None:
        self.provider_id = provider_id

    def accepts(self, source: DataSource) -> bool:
        return is_hub_source(source)

    def source_policy(self) -> dict[str, object]:
        return SourcePolicy(allowed_roots=[], allow_hub=True).model_dump()


async def get_provider_impl(config: HuggingfaceDatasetsConfig, deps: ProviderDeps) -> HubDatasets:
    return HubDatasets(deps.provider_id)
