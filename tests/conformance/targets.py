"""Which providers are held to the promises of `PostTraining`, and how each is brought to run.

    python -m pytest tests/conformance --provider inline::mine

takes one that is installed beside Postgrad instead; `--provider inline::mine@my_package` names the package that has it
for those without an entry point.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from sysconfig import get_path
from typing import Any

from tests.model_fixture import REPOSITORY
from tests.tiny_llama import save_tiny_llama


def tiny_llama(folder: Path) -> Path:
    return save_tiny_llama(folder, context=256)


@dataclass(frozen=True)
class Target:
    """One provider.

    Attributes:
        config: its section of the run.yaml.
        module: the package that has it, where no entry point says so.
        source: a package to install for it, into an environment of its own.
        behind: the provider of a further stack, to whose server this one sends jobs; `config` gets its `url`.
        model: writes the base model that it trains, a Hugging Face folder.
    """

    provider_type: str
    config: dict[str, Any] = field(default_factory=dict)
    module: str | None = None
    source: Path | None = None
    behind: Target | None = None
    model: Callable[[Path], Path] = tiny_llama

    def entry(self, **config: Any) -> dict[str, Any]:
        """Its entry in a run.yaml, with further settings."""
        entry = {"provider_id": "tested", "provider_type": self.provider_type, "config": {**self.config, **config}}
        return entry if self.module is None else {**entry, "module": self.module}


TARGETS = (
    Target("inline::torchtune"),
    Target("inline::huggingface"),
    Target("inline::plain", source=REPOSITORY / "examples" / "external_provider"),
    Target("remote::llama-stack", behind=Target("inline::torchtune")),
)


def named(option: str, model: str | None) -> Target:
    """The target that `--provider` and `--provider-model` mean."""
    provider_type, _, module = option.partition("@")
    make = tiny_llama if model is None else lambda _folder: Path(model).resolve()
    return Target(provider_type, module=module or None, model=make)


def fresh_environment(folder: Path, source: Path) -> Path:
    """A Python of its own in which the package `source` is installed, and which finds the packages of this one.

    Only what the package needs besides is taken from here; the package itself is built and installed as users do it.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # `addsitedir` and no plain line: it follows what this environment's own .pth files point to.
    (site / "postgrad.pth").write_text(f"import site; site.addsitedir({get_path('purelib')!r})\n")
    python = folder / "bin" / "python"
    install = ["--python", str(python), "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    # From a copy: a build leaves folders behind.
    copy = folder / "source"
    copy.mkdir()
    _copy(source, copy)
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *install, str(copy)],
        check=True,
        capture_output=True,
        text=True,
    )
    return python


def _copy(source: Path, target: Path) -> None:
    for file in source.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read_bytes())
