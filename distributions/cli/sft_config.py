"""The file that `postgrad sft run` takes: YAML with OmegaConf's interpolations, checked key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_args

from pydantic import BaseModel, Field, SecretStr, ValidationError

from apis.common import RequestModel
from apis.errors import FileMissing, InvalidField, NotSupported
from apis.sft_sessions.foreign_keys import USELESS
from apis.sft_sessions.models import SessionConfig
from post_training.client.errors import invalid_request
from post_training.client.tracking import Backend


class RunSettings(RequestModel):
    """What the client does. Names are OpenTinker's where it has them; what the session is are `SessionConfig`'s.

    Attributes:
        data_path, val_data_path: .jsonl, .json or .csv files of this machine.
        num_steps: optimizer steps; goes before num_epochs.
        save_freq, test_freq: steps between checkpoints and between validations; null: one at the end.
        shuffle: each epoch in an order of its own, drawn from `seed`.
        logger_backends: where metrics go; files lie under `log_dir`.
        wandb_key: stays on this machine.
        scheduler_url: the stack's; null: as the other commands find it.
    """

    data_path: str
    val_data_path: str | None = None
    batch_size: int = Field(default=8, ge=1)
    val_batch_size: int | None = Field(default=None, ge=1)
    num_epochs: int | None = Field(default=None, ge=1)
    num_steps: int | None = Field(default=None, ge=1)
    save_freq: int | None = Field(default=None, ge=1)
    test_freq: int | None = Field(default=None, ge=1)
    shuffle: bool = False
    logger_backends: list[Backend] = ["console"]
    log_dir: str = "runs"
    wandb_key: SecretStr | None = None
    scheduler_url: str | None = None
    scheduler_api_key: SecretStr | None = None
    num_gpus: int | None = Field(default=None, ge=0)


@dataclass(frozen=True)
class RunFile:
    """A checked file.

    Attributes:
        session: the fields of a `SessionConfig` that it sets.
        shown: all that it sets, without secrets.
    """

    settings: RunSettings
    session: dict[str, Any]
    shown: dict[str, Any]

    def total_steps(self, rows: int) -> int:
        """Optimizer steps of the run on so many rows."""
        run = self.settings
        return run.num_steps or (run.num_epochs or 1) * -(-rows // run.batch_size)

    def session_config(self, rows: int) -> SessionConfig:
        """What to submit; the schedule of the learning rate ends with the run where the file does not say.

        Raises:
            InvalidField: with the first key that does not fit.
        """
        fields = {"total_steps": self.total_steps(rows), **self.session}
        try:
            return SessionConfig.model_validate(fields)
        except ValidationError as error:
            raise invalid_request(error, fields) from None


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """A file with `key=value` overrides over it.

    Args:
        overrides: in OmegaConf's dot notation, as Hydra's users know it: `lora.lora_rank=8`.

    Raises:
        FileMissing: there is no such file.
        InvalidField: it is not YAML, an interpolation leads nowhere, or a key is unknown or has a wrong value.
        NotSupported: omegaconf is not installed.
    """
    content = _merged(path, overrides)
    _check_keys(content)
    try:
        settings = RunSettings.model_validate(_part(content, RunSettings))
    except ValidationError as error:
        raise invalid_request(error, content) from None
    shown = {name: value for name, value in content.items() if name not in ("wandb_key", "scheduler_api_key")}
    return RunFile(settings, _part(content, SessionConfig), shown)


def _part(content: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name in model.model_fields}


def _merged(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    omegaconf, yaml_error = _omegaconf()
    for override in overrides:
        if not override.partition("=")[1] or not override.partition("=")[0].strip():
            raise InvalidField(f"{override!r} sets nothing: write key=value", param="--set")
    try:
        loaded = omegaconf.OmegaConf.load(path)
        if not omegaconf.OmegaConf.is_dict(loaded):
            raise InvalidField(f"{path}: must hold keys and values, as in 'data_path: train.jsonl'")
        merged = omegaconf.OmegaConf.merge(loaded, omegaconf.OmegaConf.from_dotlist(list(overrides)))
        content = omegaconf.OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except FileNotFoundError:
        raise FileMissing(f"there is no file {str(path)!r}; check the path") from None
    except OSError as error:
        raise InvalidField(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml_error) as error:
        raise InvalidField(f"{path}: is not YAML: {_one_line(error)}") from None
    except omegaconf.errors.OmegaConfBaseException as error:
        raise InvalidField(f"{path}: {_one_line(error)}", param=getattr(error, "full_key", None) or None) from None
    return cast(dict[str, Any], content)


def _omegaconf() -> tuple[ModuleType, type[Exception]]:
    try:
        import omegaconf
        import yaml
    except ModuleNotFoundError as error:
        raise NotSupported(f"`postgrad sft run` needs {error.name}: pip install 'postgrad[client]'") from None
    return omegaconf, yaml.YAMLError


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _check_keys(content: Mapping[str, Any]) -> None:
    """Raises InvalidField for the first key that there is none of, or none here."""
    known = {**RunSettings.model_fields, **SessionConfig.model_fields}
    for key in content:
        if key in USELESS:
            raise InvalidField(f"{key} {USELESS[key]}", param=str(key))
        if key not in known:
            raise _unknown(str(key), str(key), known)
    for key, value in content.items():
        for model in _models_of(known[key].annotation):
            _check_nested(value, model, str(key))


def _check_nested(value: Any, model: type[BaseModel], path: str) -> None:
    if isinstance(value, Mapping):
        for key in value:
            if key not in model.model_fields:
                raise _unknown(f"{path}.{key}", str(key), model.model_fields)


def _unknown(path: str, key: str, known: Mapping[str, Any]) -> InvalidField:
    close = get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(known))}"
    return InvalidField(f"there is no key {path!r}: {hint}", param=path)


def _models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a field may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_of(argument)
