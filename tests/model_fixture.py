"""The real model for tests (SmolLM2-135M-Instruct, converted once into .cache/), and the quickstart's scripts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "examples" / "quickstart"


def real_model_dir() -> Path:
    """The model's Hugging Face directory, made if need be.

    Tests that run side by side may all call this: fetch_model.py holds a lock. It runs in a process of its own, so
    that the conversion's memory and settings do not stay with the tests.
    """
    result = subprocess.run(
        [sys.executable, str(QUICKSTART / "fetch_model.py")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, f"the model could not be fetched:\n{result.stdout}{result.stderr}"
    return Path(result.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Hugging Face directory of SmolLM2-135M-Instruct in bf16."""
    return real_model_dir()


def load_example(name: str) -> ModuleType:
    """The quickstart's script `name` as a module, although its folder is no package."""
    spec = importlib.util.spec_from_file_location(f"quickstart_{name}", QUICKSTART / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
