"""The built wheel, installed where nothing else is, serves the template from any folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    # From a copy: a build leaves folders behind, and takes in what an earlier one left.
    for name in ("apis", "post_training", "providers", "distributions", "templates", "tests"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = out.glob("postgrad-*.whl")
    return built


def test_the_wheel_holds_the_templates_and_no_tests(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert "templates/experimental-post-training/run.yaml" in names
    folders = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert folders == {"apis", "post_training", "providers", "distributions", "templates"}
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.timeout(600)
def test_the_wheel_alone_serves_the_template_without_torch(wheel: Path, tmp_path: Path):
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python, postgrad = environment / "bin" / "python", environment / "bin" / "postgrad"
    install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(REPOSITORY / "constraints.txt"), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode != 0

    env = {**os.environ, "POSTGRAD_HOME": str(tmp_path / "home")}
    command = [str(postgrad), "stack", "run", "experimental-post-training", "--port", "0"]
    server = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[-1]
        assert httpx.get(f"{url}/v1/health").json() == {"status": "OK"}
        listed = subprocess.run(
            [str(postgrad), "--endpoint", url, "post_training", "list"], capture_output=True, text=True, check=True
        )
        assert listed.stderr == ""
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        server.stdout.close()
