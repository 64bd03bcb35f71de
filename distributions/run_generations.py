"""run.yaml files of every Llama Stack from 0.1 to 0.6, put into the one shape of `StackRunConfig`.

Two steps, since only what stays may ask for its environment variables: `keep_ours` leaves out what other stacks' APIs
need, with one warning for each thing; `translate` moves what stays to its place here, once the variables are put in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apis.common import Api
from apis.errors import RunConfigInvalid
from distributions.environment import DISABLED, substitute
from providers.external import folder_files, installed
from providers.registry import is_only_upstream, types_of

log = logging.getLogger(__name__)

Section = dict[str, Any]

# Where older and newer files keep what has another name here.
_TRANSLATED = ("distro_name", "storage", "registered_resources")
_RESOURCES = ("models", "datasets")
_DEFAULT_BACKEND = "kv_default"
_DEFAULT_DATABASE = "llamastack"
_POOL = ("pool_size", "max_overflow", "pool_recycle", "pool_pre_ping", "max_write_queue_size", "num_writers")
# Without them a server would be open, or readable on the way, that was meant to be closed.
_PROTECTING = {
    "auth": "callers are known by API keys here",
    "tls_certfile": "put a proxy that speaks TLS before the server",
    "tls_keyfile": "put a proxy that speaks TLS before the server",
    "tls_cafile": "put a proxy that speaks TLS before the server",
}
_SERVER_EXTRAS = ("cors", "quota", "workers", "registry_refresh_interval_seconds")


@dataclass(frozen=True)
class Translated:
    """A run.yaml in this stack's shape.

    Attributes:
        places: sections that came from elsewhere in the file, and from where, for messages.
    """

    values: Section
    places: dict[str, str] = field(default_factory=dict)


def keep_ours(raw: Section, own: Collection[str], environ: Mapping[str, str], source: str) -> Section:
    """The sections, APIs and providers of `raw` that mean something here; a warning line for each other one.

    Args:
        raw: the file, its variables not yet put in.
        own: names of the sections that `StackRunConfig` has.
        source: what the file is called in warnings.
    """
    kept = {key: value for key, value in raw.items() if key in own or key in _TRANSLATED}
    for key, value in raw.items():
        if key not in kept and value:
            log.warning("%s: section %r has no meaning here and is left out", source, key)
    if isinstance(raw.get("storage"), dict):
        kept["storage"] = _keep_storage(raw["storage"], source)
    if isinstance(raw.get("registered_resources"), dict):
        kept["registered_resources"] = _keep_resources(raw["registered_resources"], source)
    _keep_apis(kept, source)
    external = _external_types(raw.get("external_providers_dir"), environ, source)
    providers = kept.get("providers")
    if isinstance(providers, dict):
        kept["providers"] = {
            api: _keep_providers(Api(api), entries, external, environ, source) for api, entries in providers.items()
        }
        owners = _owners(providers, kept["providers"], environ)
        for place, section in (("", kept), ("registered_resources.", kept.get("registered_resources"))):
            for name in _RESOURCES:
                if isinstance(section, dict) and isinstance(section.get(name), list):
                    section[name] = _keep_listed(section[name], f"{place}{name}", owners[name], environ, source)
    return kept


def _keep_apis(kept: Section, source: str) -> None:
    apis = {api.value for api in Api}
    listed, providers = kept.get("apis"), kept.get("providers")
    foreign: list[object] = []
    if isinstance(listed, list):
        kept["apis"] = [api for api in listed if str(api) in apis]
        foreign += [api for api in listed if str(api) not in apis]
    if isinstance(providers, dict):
        kept["providers"] = {api: entries for api, entries in providers.items() if api in apis}
        foreign += [api for api, entries in providers.items() if api not in apis and entries]
    for api in dict.fromkeys(map(str, foreign)):
        log.warning("%s: API %r is not one of this stack's (%s) and is left out", source, api, ", ".join(sorted(apis)))


def _keep_resources(resources: Section, source: str) -> Section:
    for name, entries in resources.items():
        if name not in _RESOURCES and entries:
            log.warning("%s: section 'registered_resources.%s' has no meaning here and is left out", source, name)
    return {name: entries for name, entries in resources.items() if name in _RESOURCES}


def _keep_storage(storage: Section, source: str) -> Section:
    """The one store that this stack has, and the one backend that it lies in."""
    stores, backends = storage.get("stores") or {}, storage.get("backends") or {}
    if not isinstance(stores, dict) or not isinstance(backends, dict):
        raise RunConfigInvalid(f"{source}: storage: `stores` and `backends` must each be a mapping of names")
    if foreign := sorted(name for name, store in stores.items() if name != "metadata" and store):
        log.warning("%s: storage.stores: only metadata is used here; left out: %s", source, ", ".join(foreign))
    reference = stores.get("metadata")
    name = (reference or {}).get("backend", _DEFAULT_BACKEND) if isinstance(reference or {}, dict) else None
    if not isinstance(name, str) or (reference and name not in backends):
        known = ", ".join(sorted(backends)) or "none"
        raise RunConfigInvalid(f"{source}: storage.stores.metadata.backend: no backend {name!r}; there is {known}")
    return {"backends": {name: backends[name]} if name in backends else {}}


# -- providers --------------------------------------------------------------------------------------------------------


def _keep_providers(
    api: Api, entries: Any, external: Collection[tuple[Api, str]], environ: Mapping[str, str], source: str
) -> Any:
    """The entries, those in whose place nothing can stand switched off, so that the others keep their numbers."""
    if not isinstance(entries, list):
        return entries
    heads = substitute([_head(entry) for entry in entries], environ, f"providers.{api.value}")
    kept: list[Any] = []
    for index, (entry, head) in enumerate(zip(entries, heads, strict=True)):
        reason = _left_out(api, head, external) if isinstance(head, dict) else None
        if reason:
            log.warning("%s: providers.%s.%d is left out: %s", source, api.value, index, reason)
        kept.append({"provider_id": DISABLED} if reason else entry)
    if kept != entries and not any(_is_on(head) for head in substitute(list(map(_head, kept)), environ)):
        log.warning("%s: no provider of %s is left, so nothing of it is served", source, api.value)
    return kept


def _head(entry: Any) -> Any:
    """What tells which provider an entry means; its configuration may name variables of a provider that is left out."""
    heads = ("provider_id", "provider_type", "module")
    return {key: entry[key] for key in heads if key in entry} if isinstance(entry, dict) else entry


def _is_on(head: Any) -> bool:
    return isinstance(head, dict) and head.get("provider_id") not in (None, "", DISABLED)


def _left_out(api: Api, head: Section, external: Collection[tuple[Api, str]]) -> str | None:
    kind = head.get("provider_type")
    if not _is_on(head) or not isinstance(kind, str) or head.get("module") or (api, kind) in external:
        return None
    # What other packages offer is looked at last: it is imported for that.
    if is_only_upstream(api, kind) and is_only_upstream(api, kind, installed().specs):
        have = ", ".join(types_of(api)) or "none"
        return f"{kind!r} is a provider of Llama Stack's that this stack does not have; it has {have}"
    return None


def _owners(given: Section, kept: Section, environ: Mapping[str, str]) -> dict[str, set[object]]:
    """The ids of providers that a listed model or data set may name, None among them where it need name none.

    A model that names none is of the only provider of inference, and goes with it.
    """
    on = {api: [head for head in _heads(entries, environ) if _is_on(head)] for api, entries in kept.items()}
    ids: set[object] = {head["provider_id"] for heads in on.values() for head in heads}
    inference = Api.inference.value
    had_inference = any(map(_is_on, _heads(given.get(inference), environ)))
    return {"models": ids if had_inference and not on[inference] else {*ids, None}, "datasets": {*ids, None}}


def _heads(entries: Any, environ: Mapping[str, str]) -> list[Any]:
    return substitute([_head(entry) for entry in entries], environ) if isinstance(entries, list) else []


def _keep_listed(
    entries: list[Any], place: str, owners: Collection[object], environ: Mapping[str, str], source: str
) -> list[Any]:
    """The entries whose provider is there: those of another may name variables that nobody has set."""
    kept: list[Any] = []
    for index, entry in enumerate(entries):
        owner = _owner(entry, environ, f"{place}.{index}") if isinstance(entry, dict) else DISABLED
        if owner in owners or owner == DISABLED:
            kept.append(entry)
        else:
            whose = "its provider is" if owner is None else f"there is no provider {owner!r}, or it is"
            log.warning("%s: %s.%d is left out, since %s left out", source, place, index, whose)
    return kept


def _owner(entry: Section, environ: Mapping[str, str], place: str) -> object:
    """The provider that an entry names, `DISABLED` where it is switched off by naming nothing."""
    given = entry.get("provider_id")
    owner = substitute({"provider_id": given}, environ, place)["provider_id"] or None
    return DISABLED if owner is None and given is not None else owner


def _external_types(folder: Any, environ: Mapping[str, str], source: str) -> Collection[tuple[Api, str]]:
    """API and type of each provider of our APIs that lies in an `external_providers_dir`."""
    folder = substitute({"external_providers_dir": folder}, environ)["external_providers_dir"]
    if not folder:
        return set()
    if not isinstance(folder, str) or not Path(folder).is_dir():
        log.warning("%s: external_providers_dir: there is no folder %s", source, folder)
        return set()
    return folder_files(Path(folder)).keys()


# -- once the variables are put in ------------------------------------------------------------------------------------


def translate(values: Section, source: str) -> Translated:
    """What `keep_ours` kept, its variables put in, in the shape of `StackRunConfig`.

    Raises:
        RunConfigInvalid: a setting that protects a server and that this one does not have, or an impossible storage.
    """
    moved = {key: value for key, value in values.items() if key not in _TRANSLATED}
    places: dict[str, str] = {}
    if moved.get("image_name") is None and values.get("distro_name") is not None:
        moved["image_name"] = values["distro_name"]
    _move_storage(values.get("storage"), moved, places, source)
    _move_resources(values.get("registered_resources"), moved, places, source)
    if isinstance(moved.get("server"), dict):
        moved["server"] = _server(moved["server"], source)
    return Translated(moved, places)


def _move_storage(storage: Any, moved: Section, places: dict[str, str], source: str) -> None:
    if storage is None:
        return
    if not isinstance(storage, dict):
        raise RunConfigInvalid(f"{source}: storage must be a mapping with `backends` and `stores`")
    for name, backend in storage["backends"].items():
        place = f"storage.backends.{name}"
        if moved.get("metadata_store") is not None:
            log.warning("%s: metadata_store is left out, since %s says where the store lies", source, place)
        moved["metadata_store"] = _store(backend, place, source)
        places["metadata_store"] = place


def _store(backend: Any, place: str, source: str) -> Section:
    """A backend as a `metadata_store`. `kv_` and `sql_` are the same store here."""
    if not isinstance(backend, dict) or not isinstance(backend.get("type"), str):
        raise RunConfigInvalid(f"{source}: {place}.type is missing: kv_sqlite, kv_postgres, sql_sqlite or sql_postgres")
    kind = backend["type"].removeprefix("kv_").removeprefix("sql_")
    if kind not in ("sqlite", "postgres"):
        raise RunConfigInvalid(
            f"{source}: {place}.type: jobs are not kept in {backend['type']!r}; use kv_sqlite or kv_postgres"
        )
    if pool := [name for name in _POOL if backend.get(name) is not None]:
        log.warning("%s: %s: without effect here: %s", source, place, ", ".join(pool))
    # Upstream's names of table and keys; one store holds all here.
    store = {key: value for key, value in backend.items() if key not in (*_POOL, "table_name", "namespace")}
    database = {"db": backend.get("db") or _DEFAULT_DATABASE} if kind == "postgres" else {}
    return {**store, **database, "type": kind}


def _move_resources(resources: Any, moved: Section, places: dict[str, str], source: str) -> None:
    if resources is None:
        return
    if not isinstance(resources, dict):
        raise RunConfigInvalid(f"{source}: registered_resources must be a mapping with lists such as `models`")
    for name, entries in resources.items():
        place, listed = f"registered_resources.{name}", moved.get(name)
        if not listed:
            moved[name], places[name] = entries, place
        elif isinstance(entries, list) and isinstance(listed, list):
            moved[name] = [*listed, *entries]
        elif entries is not None:
            raise RunConfigInvalid(f"{source}: {place} must be a list")


def _server(server: Section, source: str) -> Section:
    for name, instead in _PROTECTING.items():
        if server.get(name) is not None:
            raise RunConfigInvalid(f"{source}: server.{name}: this server does not have it; {instead}")
    for name in _SERVER_EXTRAS:
        if server.get(name) not in (None, False):
            log.warning("%s: server.%s has no effect here and is left out", source, name)
    return {key: value for key, value in server.items() if key not in (*_PROTECTING, *_SERVER_EXTRAS)}
