"""The shipped template as a process of its own, asked over HTTP and by the real Llama Stack client, unmodified."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from llama_stack_client import BadRequestError, LlamaStackClient, NotFoundError

from apis.datasets.models import URIDataSource
from providers.hub.provider import HubDatasets
from tests.served_stack import PROGRAM, TEMPLATE, served
from tests.test_run_config import UPSTREAM

SUBMIT = "/v1/post-training/supervised-fine-tune"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("template") / "home") as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(template: str) -> Iterator[LlamaStackClient]:
    with LlamaStackClient(base_url=template, max_retries=0) as made:
        yield made


def test_the_template_answers_version_health_providers_routes_and_models(template: str):
    assert httpx.get(f"{template}/v1/health").json() == {"status": "OK"}
    assert httpx.get(f"{template}/v1/version").json() == {"version": "0.1.0"}
    providers = httpx.get(f"{template}/v1/providers").json()["data"]
    assert {(p["api"], p["provider_type"]) for p in providers} == {
        ("post_training", "inline::torchtune"),
        ("datasetio", "inline::localfs"),
        ("inference", "inline::transformers"),
    }
    routes = {(r["method"], r["route"]) for r in httpx.get(f"{template}/v1/inspect/routes").json()["data"]}
    for prefix in ("/v1", "/v1/openai/v1"):
        assert ("POST", f"{prefix}/chat/completions") in routes
        assert httpx.get(f"{template}{prefix}/models").json() == {"object": "list", "data": []}
    assert httpx.get(f"{template}/v1/nothing").status_code == 404
    assert httpx.post(f"{template}{SUBMIT}", json={"job_uuid": "j", "x": 1}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/openai/v1/completions"])
def test_openai_routes_answer_errors_in_openais_envelope(template: str, path: str):
    ask = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    unknown = httpx.post(template + path, json={"model": "nobody", **ask})
    assert unknown.status_code == 404
    assert set(unknown.json()) == {"error"}
    assert set(unknown.json()["error"]) == {"message", "type", "param", "code"}
    assert (unknown.json()["error"]["type"], unknown.json()["error"]["code"]) == (
        "invalid_request_error",
        "model_not_found",
    )
    wrong = httpx.post(template + path, json={"model": "nobody", "no_such_field": 1, **ask})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "no_such_field")


def test_the_real_sdk_reads_providers_models_and_jobs(client: LlamaStackClient):
    assert {p.provider_id for p in client.providers.list()} == {"transformers", "localfs", "torchtune"}
    assert client.inspect.version().version == "0.1.0"
    assert client.inspect.health().status == "OK"
    assert any(route.route == "/v1/models" for route in client.routes.list())
    assert client.models.list() == []
    assert client.post_training.job.list() == []
    with pytest.raises(NotFoundError):
        client.post_training.job.status(job_uuid="nobody")
    with pytest.raises(BadRequestError, match="n_epochs"):
        client.post_training.supervised_fine_tune(
            job_uuid="j",
            training_config={"n_epochs": 0, "max_steps_per_epoch": 1, "gradient_accumulation_steps": 1},
            hyperparam_search_config={},
            logger_config={},
        )


def test_the_real_sdk_registers_reads_and_forgets_a_data_set(client: LlamaStackClient):
    rows: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    ]
    client.datasets.register(dataset_id="sdk", purpose="post-training/messages", source={"type": "rows", "rows": rows})
    assert [d.identifier for d in client.datasets.list()] == ["sdk"]
    found = client.datasets.retrieve("sdk")
    assert found is not None
    assert found.purpose == "post-training/messages"
    assert client.datasets.iterrows("sdk").data == rows
    client.datasets.unregister("sdk")
    assert client.datasets.list() == []


def test_the_real_command_line_registers_lists_and_forgets_a_data_set(template: str, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')

    def cli(*arguments: str) -> str:
        command = [str(Path(sys.executable).parent / "llama-stack-client"), "--endpoint", template, *arguments]
        # Its own configuration file would go before --endpoint.
        env = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "200"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=tmp_path).stdout

    register = ("datasets", "register", "--dataset-id", "cli", "--purpose", "post-training/messages")
    assert "Failed" not in cli(*register, "--dataset-path", "rows.jsonl", "--metadata", '{"by": "cli"}')
    assert "cli" in cli("datasets", "list")
    stored = httpx.get(f"{template}/v1/datasets/cli").json()
    assert base64.b64decode(stored["source"]["uri"].partition(",")[2]) == (tmp_path / "rows.jsonl").read_bytes()
    assert stored["metadata"] == {"by": "cli"}
    cli("datasets", "unregister", "cli")
    assert httpx.get(f"{template}/v1/datasets/cli").status_code == 404
    assert "job_not_found" in cli("post_training", "status", "--job-uuid", "nobody")


def test_the_server_takes_two_cpu_seconds_at_most_and_stops_on_a_signal_with_a_request_half_sent(tmp_path: Path):
    began = time.monotonic()
    with served(tmp_path / "home") as (url, process):
        assert time.monotonic() - began < 15  # others may use the cores, so the CPU time below is what tells
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as half_sent:
            half_sent.sendall(b"POST /v1/datasets HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n\r\n{")
            half_sent.settimeout(0.5)
            with pytest.raises(TimeoutError):
                half_sent.recv(1)  # not answered: the server waits for the rest of it
            process.send_signal(signal.SIGTERM)
            exit_code, cpu_seconds = _wait(process, 15)
        assert exit_code == 0
        assert cpu_seconds < 2
        assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


def _wait(process: subprocess.Popen[str], seconds: float) -> tuple[int, float]:
    """Exit code and CPU seconds, from start to end, of a process that must end within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_utime + usage.ru_stime
        time.sleep(0.02)
    raise AssertionError(f"the server still runs {seconds} s after SIGTERM")


def test_the_server_never_imports_torch():
    program = (
        "import sys, distributions.server, distributions.cli.stack\n"
        "from distributions.resolver import plan\n"
        "from distributions.run_config import load_run_config\n"
        f"plan(load_run_config({TEMPLATE!r}, {{}}))\n"
        "heavy = {'torch', 'transformers', 'torchtune', 'torchao', 'peft', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_without_a_key_answers_only_under_a_loopback_name(template: str):
    port = template.rsplit(":", 1)[1]
    for name in (f"127.0.0.1:{port}", f"localhost:{port}", "LOCALHOST", "[::1]:8321", "127.0.0.2"):
        assert httpx.get(f"{template}/v1/models", headers={"Host": name}).status_code == 200, name
    for name in (f"evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0", ""):
        refused = httpx.get(f"{template}/v1/models", headers={"Host": name})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Host"), name


def test_an_upstream_run_yaml_is_served(tmp_path: Path):
    run_yaml = tmp_path / "upstream.yaml"
    run_yaml.write_text(UPSTREAM)
    store = tmp_path / "store"
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        served(tmp_path / "home", stack=str(run_yaml), stderr=errors, SQLITE_STORE_DIR=str(store)) as (url, _),
    ):
        providers = {p["provider_id"]: p for p in httpx.get(f"{url}/v1/providers").json()["data"]}
        with LlamaStackClient(base_url=url, max_retries=0) as client:
            assert client.post_training.job.list() == []
            source = {"type": "rows", "rows": [{"prompt": "a", "completion": "b"}]}
            assert client.datasets.register(purpose="post-training/messages", source=source).provider_id == "localfs"  # pyright: ignore[reportArgumentType]
    assert set(providers) == {"meta-reference-inference", "localfs", "huggingface", "torchtune-post-training"}
    assert providers["meta-reference-inference"]["config"]["max_context_tokens"] == 4096
    assert "meta-reference" not in log.read_text()  # its one setting has a counterpart
    assert (store / "registry.db").is_file()
    assert HubDatasets("hub").accepts(URIDataSource(uri="huggingface://datasets/a/b?split=train"))
    assert not HubDatasets("hub").accepts(URIDataSource(uri="data:text/csv,a"))


def test_a_second_server_on_the_same_state_folder_is_refused(tmp_path: Path):
    home = tmp_path / "home"
    command = [sys.executable, "-c", PROGRAM, "run", TEMPLATE, "--port", "0"]
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60, "check": False}
    with served(home) as (url, process):
        refused = subprocess.run(command, env={**os.environ, "POSTGRAD_HOME": str(home)}, **options)
        assert refused.returncode == 1
        assert f"another server runs on the state folder {home}" in refused.stderr
        assert httpx.get(f"{url}/v1/health").status_code == 200
        process.kill()
        process.wait()
    with served(home) as (url, _):  # a killed one leaves no lock behind
        assert httpx.get(f"{url}/v1/health").status_code == 200


def test_an_answer_on_a_kept_connection_does_not_wait_for_an_acknowledgement(template: str):
    durations = []
    with httpx.Client(base_url=template) as http:
        for _ in range(30):
            start = time.perf_counter()
            http.get("/v1/version")
            durations.append(time.perf_counter() - start)
    # A delayed acknowledgement takes 40 ms on Linux, and every answer would have to wait for one.
    assert sorted(durations)[len(durations) // 2] < 0.03
