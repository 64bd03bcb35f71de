"""Providers from other packages: those installed with an entry point, those in a folder of YAML files, and a module
that a run.yaml names.

Whatever cannot be loaded becomes a fault, one line with its name. A fault alone keeps no stack down: it is told where a
run.yaml names a type that nobody serves.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from apis.common import Api
from apis.errors import ProviderInvalid
from providers.registry import BUILT_IN
from providers.spec import ProviderSpec, check_spec_version

ENTRY_POINTS = "postgrad.providers"
SPEC_FUNCTION = "get_provider_spec"

_MODULE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\s*==\s*([\w.!+-]+))?")
# What Llama Stack's files say besides. The first names what the file's name says already; the rest has no place here.
_WITHOUT_EFFECT = ("adapter_type", "provider_data_validator", "container_image")


@dataclass(frozen=True)
class Found:
    """Providers at hand.

    Attributes:
        faults: a line for each that could not be loaded.
    """

    specs: tuple[ProviderSpec, ...] = ()
    faults: tuple[str, ...] = ()


def known(folder: Path | None = None) -> Found:
    """The built-in providers, those installed, and those of an `external_providers_dir`."""
    parts = [Found(BUILT_IN), installed(), from_folder(folder) if folder is not None else Found()]
    return Found(
        tuple(spec for part in parts for spec in part.specs), tuple(fault for part in parts for fault in part.faults)
    )


def installed() -> Found:
    """Providers that installed packages offer under the entry point group `postgrad.providers`.

    An entry point names a `ProviderSpec`, several, or a function that returns one or several.
    """
    specs: list[ProviderSpec] = []
    faults: list[str] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: (point.name, point.value)):
        try:
            with without_torch(point.module):
                specs += _specs(point.load())
        except Exception as error:  # a package's import may fail in any way
            faults.append(f"provider {point.name!r} of {_package(point)}: {point.value}: {_cause(error)}")
    return Found(tuple(specs), tuple(faults))


def from_folder(folder: Path) -> Found:
    """Providers described by files `<inline|remote>/<api>/<name>.yaml`; their type is `<inline|remote>::<name>`."""
    specs: list[ProviderSpec] = []
    faults: list[str] = []
    for (api, provider_type), file in folder_files(folder).items():
        try:
            specs.append(_read(file, api, provider_type))
        except ProviderInvalid as error:
            faults.append(f"provider {provider_type!r} of {file}: {error.message}")
    return Found(tuple(specs), tuple(faults))


def folder_files(folder: Path) -> dict[tuple[Api, str], Path]:
    """The files that `from_folder` reads, by API and type; none where there is no such folder."""
    apis = {api.value: api for api in Api}
    files = [file for kind in ("inline", "remote") for file in sorted(folder.glob(f"{kind}/*/*.yaml"))]
    return {
        (apis[file.parent.name], f"{file.parent.parent.name}::{file.stem}"): file
        for file in files
        if file.parent.name in apis
    }


def from_module(requirement: str, api: Api, provider_type: str) -> ProviderSpec:
    """The spec that a run.yaml's `module: package` or `module: package==version` stands for.

    It is what `get_provider_spec()` of `package.provider` returns, or that of its specs which is meant.

    Raises:
        ProviderInvalid: no such package, another version of it, or it has no such provider.
    """
    parsed = _MODULE.fullmatch(requirement.strip())
    if parsed is None:
        raise ProviderInvalid(f"module {requirement!r} is not a package's import name, or that and ==version")
    package, wanted = parsed.groups()
    if wanted is not None:
        _check_package_version(package, wanted)
    name = f"{package}.provider"
    try:
        with without_torch(name):
            specs = _specs(getattr(importlib.import_module(name), SPEC_FUNCTION))
    except Exception as error:  # a package's import may fail in any way
        raise ProviderInvalid(
            f"provider {provider_type!r} cannot be loaded: {SPEC_FUNCTION} of {name}: {_cause(error)}"
        ) from error
    for spec in specs:
        if (spec.api, spec.provider_type) == (api, provider_type):
            return spec
    have = ", ".join(f"{spec.provider_type} ({spec.api.value})" for spec in specs) or "none"
    raise ProviderInvalid(f"module {package} has no provider {provider_type!r} for {api.value}; it has {have}")


@contextmanager
def without_torch(module: str) -> Iterator[None]:
    """Raises ProviderInvalid where importing the provider's `module`, which the block does, brings torch with it."""
    had_it = "torch" in sys.modules
    yield
    if "torch" in sys.modules and not had_it:
        raise ProviderInvalid(
            f"importing {module} imports torch, which the server must do without; import it in the module that workers "
            "load, and nowhere else"
        )


def _check_package_version(package: str, wanted: str) -> None:
    top = package.partition(".")[0]
    try:
        found = version(top)
    except PackageNotFoundError:
        names = packages_distributions().get(top)
        if not names:
            raise ProviderInvalid(f"no package {package} is installed; install {package}=={wanted}") from None
        found = version(names[0])
    if found != wanted:
        raise ProviderInvalid(f"module {package}=={wanted}: version {found} is installed; install {package}=={wanted}")


def _specs(given: Any) -> list[ProviderSpec]:
    """Raises ProviderInvalid where it is no spec; whatever the function raises."""
    if callable(given):
        given = given()
    several = [given] if isinstance(given, ProviderSpec | Mapping) or not isinstance(given, Iterable) else list(given)
    return [_spec(one) for one in several]


def _spec(given: Any) -> ProviderSpec:
    if isinstance(given, Mapping):
        return _validated(given)
    if not isinstance(given, ProviderSpec):
        raise ProviderInvalid(f"it gives {type(given).__name__}, not a ProviderSpec of providers.spec")
    check_spec_version(given.provider_type, given.spec_version)
    return given


def _validated(values: Mapping[Any, Any]) -> ProviderSpec:
    # Before the fields, which may be another version's.
    check_spec_version(values.get("provider_type", "it"), values.get("spec_version", 1))
    try:
        return ProviderSpec.model_validate(values)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ProviderInvalid("; ".join(faults)) from None


def _read(file: Path, api: Api, provider_type: str) -> ProviderSpec:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProviderInvalid(f"it cannot be read as YAML: {_cause(error)}") from None
    if not isinstance(values, dict):
        raise ProviderInvalid("it must be a mapping with `module` and `config_class`")
    adapter = values.pop("adapter", None)
    if isinstance(adapter, dict):  # files for remote providers keep some of it there
        values = {**adapter, **values}
    kept = {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT and value is not None}
    return _validated({**kept, "api": api, "provider_type": provider_type})


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown package"


def _cause(error: BaseException) -> str:
    return error.message if isinstance(error, ProviderInvalid) else f"{type(error).__name__}: {error}"
