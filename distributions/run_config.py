"""A run.yaml, read: which template or file, checked, with its environment variables put in."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from apis.common import Api
from apis.datasets.models import RegisterDatasetRequest
from apis.errors import InvalidField, RunConfigInvalid, UnknownTemplate
from apis.models.models import RegisterModelRequest
from distributions.dialects.llama_stack_v1 import translate_dataset_registration
from distributions.environment import DISABLED, substitute
from distributions.home import state_home
from distributions.run_generations import keep_ours, translate
from post_training.jobs.devices import slots_of, visible_gpus
from post_training.jobs.launchers.ray import RaySettings, ray_slots
from post_training.jobs.scheduler import SchedulerSettings

log = logging.getLogger(__name__)

DEFAULT_PORT = 8321
MAX_BODY_BYTES = 64 * 2**20
_SHOWN_FAULTS = 5
# Beside this package in a checkout and in an installed wheel alike. importlib.resources can't open a namespace package
# of an editable installation, and would mix in any other folder of that common name.
_TEMPLATES = Path(__file__).resolve().parent.parent / "templates"


class _Section(BaseModel):
    # A variable's text such as "8321" or "2024" is read as a number before it gets here; a name may well look like one.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


class ProviderEntry(_Section):
    """One provider. A `provider_id` that is null, empty or `__disabled__` switches it off.

    Attributes:
        module: the package that has the provider, or `package==version`; see `providers.external.from_module`.
    """

    provider_id: str = DISABLED
    provider_type: str = ""
    config: dict[str, Any] = {}
    module: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _id_is_given(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "provider_id" not in value:
            raise ValueError("provider_id is missing")
        return value

    @model_validator(mode="after")
    def _type_is_given(self) -> ProviderEntry:
        if self.enabled and not self.provider_type:
            raise ValueError("provider_type is missing")
        return self

    @property
    def enabled(self) -> bool:
        return self.provider_id not in ("", DISABLED)


class StoreConfig(_Section):
    """Where jobs, data sets and models are kept: a SQLite file, or PostgreSQL by `url` or by its parts.

    `ssl_mode` and `ca_cert_path` are libpq's sslmode and sslrootcert.
    `namespace` and `table_name` are accepted because Llama Stack's run.yaml files have them, and do nothing.
    """

    type: Literal["sqlite", "postgres"] = "sqlite"
    namespace: str | None = None
    db_path: str | None = None
    url: str | None = None
    host: str = "localhost"
    port: int = 5432
    db: str = "postgrad"
    user: str = "postgrad"
    password: str = ""
    ssl_mode: str | None = None
    ca_cert_path: str | None = None
    table_name: str | None = None

    def sqlalchemy_url(self, home: Path) -> str:
        if self.url:
            return self.url
        if self.type == "sqlite":
            return f"sqlite:///{self.db_path or home / 'postgrad.db'}"
        login = quote(self.user, safe="") + (f":{quote(self.password, safe='')}" if self.password else "")
        name, secure = quote(self.db, safe=""), {"sslmode": self.ssl_mode, "sslrootcert": self.ca_cert_path}
        options = {key: value for key, value in secure.items() if value}
        if self.host.startswith("/"):  # the folder of a Unix socket
            options = {"host": self.host, "port": str(self.port), **options}
            return f"postgresql://{login}@/{name}?{urlencode(options, safe='/')}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"postgresql://{login}@{host}:{self.port}/{name}" + (f"?{urlencode(options)}" if options else "")


class ServerConfig(_Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = DEFAULT_PORT
    api_key: Annotated[str, Field(min_length=1)] | None = None
    max_body_bytes: Annotated[int, Field(ge=1024)] = MAX_BODY_BYTES


class RayConfig(_Section):
    """The Ray cluster that workers run on, and what each takes of it. The attributes are `RaySettings`'."""

    address: str = "auto"
    num_cpus: Annotated[int, Field(ge=1)] = 1
    num_gpus: Annotated[float, Field(gt=0, le=1)] = 1.0
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if not re.fullmatch(r"auto|local|(\[[0-9A-Fa-f:.]+\]|[\w.-]+):[0-9]+", value):
            raise ValueError(
                f"{value!r} is no address: use auto, local, or host:port of the head node; ray:// does not serve, "
                "since the server's machine must belong to the cluster"
            )
        return value

    def settings(self) -> RaySettings:
        return RaySettings(self.address, self.num_cpus, self.num_gpus, self.resources)


class JobsConfig(_Section):
    """How many jobs run at once, wait, and are tried again.

    Attributes:
        launcher: where workers run: `local`, this machine, or `ray`, the nodes of a Ray cluster.
        ray: the cluster.
        devices: `auto` (every visible GPU, else the CPU) or a list: one job at a time for each entry, so `[cpu, cpu]`
            runs two, each with half of the cores. With Ray, `cpu` or `cuda` for each worker of the cluster.
        max_queued: waiting jobs beyond which a submit is answered with 429.
        max_attempts: attempts that may end without a result, since a job's newest checkpoint, before it fails.
        warm_seconds: how long a worker that has ended its job waits for the next one, which then starts in a second or
            two; 0: each job has a process of its own. A waiting worker holds no model.
        session_host: the address that the training servers of sessions listen on, each on a port of its own; 0.0.0.0 or
            :: for clients on other machines, which are told the address of the worker's machine.
    """

    launcher: Literal["local", "ray"] = "local"
    ray: RayConfig | None = None
    devices: Annotated[Literal["auto"] | list[str], Field(validate_default=True)] = "auto"
    max_queued: Annotated[int, Field(ge=1)] = 100
    max_attempts: Annotated[int, Field(ge=1, le=1000)] = 3
    warm_seconds: Annotated[float, Field(ge=0, le=86400)] = 300.0
    session_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"

    @field_validator("ray")
    @classmethod
    def _is_used(cls, value: RayConfig | None, info: ValidationInfo) -> RayConfig | None:
        if value is not None and info.data.get("launcher") == "local":
            raise ValueError("a cluster is used with launcher: ray only")
        return value

    @field_validator("devices")
    @classmethod
    def _are_devices(cls, value: Literal["auto"] | list[str], info: ValidationInfo) -> Literal["auto"] | list[str]:
        try:
            ray_slots(value) if info.data.get("launcher") == "ray" else slots_of(value)
        except InvalidField as error:
            raise ValueError(error.message) from None
        return value

    def settings(self, environ: Mapping[str, str]) -> SchedulerSettings:
        limits = (self.max_queued, self.max_attempts, self.warm_seconds, self.session_host)
        if self.launcher == "ray":
            return SchedulerSettings(ray_slots(self.devices), *limits, ray=(self.ray or RayConfig()).settings())
        slots = slots_of(self.devices, environ)
        visible = visible_gpus(environ)
        for slot in slots:
            # No refusal: not every system shows its GPUs where they are looked for.
            if slot.kind == "cuda" and int(slot.device.partition(":")[2]) >= visible:
                log.warning("jobs.devices: %s is listed, but %d CUDA devices are visible here", slot.device, visible)
        return SchedulerSettings(slots, *limits)


class LoggingConfig(_Section):
    """`all` sets the level of everything, any other name that of the logger so called."""

    category_levels: dict[str, str] = {}


class ModelEntry(RegisterModelRequest):
    model_config = ConfigDict(coerce_numbers_to_str=True)


class DatasetEntry(RegisterDatasetRequest):
    provider_id: str | None = None


def _store(value: Any) -> Any:
    return {"type": "postgres", "url": value} if isinstance(value, str) else value


def _empty_list(value: Any) -> Any:
    return [] if value is None else value


def _without_disabled(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [item for item in value if not (isinstance(item, Mapping) and item.get("provider_id") == DISABLED)]


def _dataset_entry(value: Any) -> Any:
    return translate_dataset_registration(value) if isinstance(value, dict) else value


class StackRunConfig(_Section):
    """What a run.yaml of `version: 2` says, as far as it concerns this stack.

    Attributes:
        external_providers_dir: a folder of files that describe providers; see `providers.external.from_folder`.
    """

    version: Annotated[Literal[2], BeforeValidator(lambda v: 2 if v == "2" else v)] = 2
    image_name: str = "postgrad"
    apis: list[Api] = []
    providers: dict[Api, Annotated[list[ProviderEntry], BeforeValidator(_empty_list)]] = {}
    external_providers_dir: Path | None = None
    metadata_store: Annotated[StoreConfig, BeforeValidator(_store)] = StoreConfig()
    models: Annotated[list[ModelEntry], BeforeValidator(_without_disabled)] = []
    datasets: Annotated[
        list[Annotated[DatasetEntry, BeforeValidator(_dataset_entry)]], BeforeValidator(_without_disabled)
    ] = []
    server: ServerConfig = ServerConfig()
    jobs: JobsConfig = JobsConfig()
    logging: LoggingConfig = LoggingConfig()

    _environ: dict[str, str] = {}

    @property
    def home(self) -> Path:
        """The state folder under the environment that the file was read with."""
        return state_home(self._environ)

    @property
    def environ(self) -> Mapping[str, str]:
        return self._environ

    def serves(self, api: Api) -> bool:
        return not self.apis or api in self.apis


def template_names() -> list[str]:
    """Every template that ships with this installation, sorted."""
    return sorted(file.parent.name for file in _TEMPLATES.glob("*/run.yaml"))


def template_text(name: str) -> str:
    return (_TEMPLATES / name / "run.yaml").read_text(encoding="utf-8")


def load_run_config(name_or_path: str, environ: Mapping[str, str]) -> StackRunConfig:
    """Read a template by its name, or a run.yaml by its path.

    Raises:
        UnknownTemplate: neither a template nor a file.
        RunConfigInvalid: not YAML (with the line), or a value that cannot be used (with its dotted path).
        EnvironmentUnset: see `environment.substitute`.
    """
    text, source = _read(name_or_path)
    raw = _parse(text, source)
    ours = keep_ours(raw, StackRunConfig.model_fields, environ, source)
    translated = translate(substitute(ours, environ), source)
    try:
        config = StackRunConfig.model_validate(translated.values)
    except ValidationError as error:
        raise RunConfigInvalid(f"{source}: {_faults(error, translated.places)}") from None
    if config.metadata_store.namespace or config.metadata_store.table_name:
        log.warning("%s: metadata_store: namespace and table_name have no effect: the tables' names are fixed", source)
    config._environ = dict(environ)
    return config


def _read(name_or_path: str) -> tuple[str, str]:
    names = template_names()
    if name_or_path in names:
        return template_text(name_or_path), f"template {name_or_path}"
    path = Path(name_or_path).expanduser()
    path = path / "run.yaml" if path.is_dir() else path
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except FileNotFoundError:
        if path.suffix in (".yaml", ".yml") or "/" in name_or_path:
            raise RunConfigInvalid(f"there is no file {path}; templates by name: {', '.join(names)}") from None
        raise UnknownTemplate(
            f"there is no template {name_or_path!r}; there are: {', '.join(names)}; or give the path of a run.yaml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunConfigInvalid(f"{path} cannot be read as UTF-8 text: {error}") from error


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        what = getattr(error, "problem", None) or str(error)
        raise RunConfigInvalid(f"{source}{where}: not YAML: {what}") from None
    if not isinstance(raw, dict):
        raise RunConfigInvalid(f"{source}: a run.yaml is a mapping with keys such as version, apis and providers")
    return raw


def _faults(error: ValidationError, places: Mapping[str, str]) -> str:
    """Each fault with its dotted path in the file; `places`: see `Translated`."""
    found = [(list(map(str, fault["loc"])), fault["msg"]) for fault in error.errors()]
    faults = [f"{'.'.join([*(places.get(part, part) for part in loc[:1]), *loc[1:]])}: {msg}" for loc, msg in found]
    more = len(faults) - _SHOWN_FAULTS
    return "; ".join(faults[:_SHOWN_FAULTS]) + (f"; and {more} more" if more > 0 else "")
