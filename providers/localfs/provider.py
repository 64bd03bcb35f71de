"""inline::localfs: rows from requests, `data:` URIs, files under allowed roots; the hub and URLs where allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from apis.datasets.models import DataSource
from post_training.data.sources import SourcePolicy, is_hub_source
from providers.localfs.config import LocalFSConfig
from providers.spec import ProviderDeps


class LocalFiles:
    """Fulfils `apis.datasets.DatasetIO`. Roots are made absolute here, since workers start in other folders."""

    def __init__(self, provider_id: str, config: LocalFSConfig, default_roots: Sequence[Path]) -> None:
        self.provider_id = provider_id
        configured = config.allowed_roots
        roots = default_roots if configured is None else [Path(root).expanduser() for root in configured]
        self._policy = SourcePolicy(
            allowed_roots=[str(root.resolve()) for root in roots],
            allow_hub=config.allow_hub,
            max_inline_bytes=config.max_inline_bytes,
            allowed_hosts=config.allowed_hosts,
            allow_private_addresses=config.allow_private_addresses,
            max_fetch_bytes=config.max_fetch_bytes,
            fetch_seconds=config.fetch_seconds,
        )

    def accepts(self, source: DataSource) -> bool:
        """All but hub data sets, which another provider may offer where this one does not."""
        return self._policy.allow_hub or not is_hub_source(source)

    def source_policy(self) -> dict[str, object]:
        return self._policy.model_dump()


async def get_provider_impl(config: LocalFSConfig, deps: ProviderDeps) -> LocalFiles:
    return LocalFiles(deps.provider_id, config, [deps.home / "data"])
