"""Ids, paths and URIs that try to climb out, on every operation of every dialect.

None may break the server, show a byte of a file outside the state folder and the allowed roots, open one, or leave a
trace there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from distributions.openapi import operations
from post_training.jobs.spec import JobSpec
from post_training.jobs.store import JobStore
from tests.fuzzed_stack import (
    DATASET,
    ENDED,
    FILE,
    MODEL,
    SECRET,
    STEP,
    WAITING,
    Answer,
    FuzzedStack,
    fuzzed_stack,
    watching,
)
from tests.in_memory_stack import serving
from tests.public_schema import SNAPSHOT

OPERATIONS = [
    line.removesuffix(" (deprecated)")
    for line in SNAPSHOT.read_text(encoding="utf-8").splitlines()
    if line.startswith(("GET ", "POST ", "DELETE "))
]
ASKING = [
    label for label in OPERATIONS if label.startswith("POST ") or "{" in label or "/get" in label or "job" in label
]

IDS = [
    "..",
    ".",
    "../..",
    "../../outside/secret.json",
    "a/../../../outside",
    "a/./b",
    "/",
    "//",
    "/etc/passwd",
    "..\\..\\outside",
    "%2e%2e%2foutside",
    "%252e%252e%252f",
    "..%c0%afoutside",
    "\0",
    "a\0b",
    "a\nb",
    "a\r\nx-injected: 1",
    "~",
    "$HOME",
    "${env.HOME}",
    "C:\\x",
    "-rf",
    ".hidden",
    "a/",
    " a",
    "\u202ea",
    "e\u0301",
    "\uff0e\uff0e\uff0foutside",  # full-width dots and slash
    "\u2025\u2215outside",  # one character for two dots, another slash
    "\u212a",  # becomes an ASCII k when folded
    "\ud800",
    "x" * 256,
    "x" * 20_000,
    "a/" * 3000,
    "'; DROP TABLE jobs; --",
    f"{ENDED}/checkpoints/{STEP}/files/{FILE}",
]

# A body for each path that takes one, by its end; the fields that name something are changed one at a time.
DATA = {"dataset_id": DATASET, "validation_dataset_id": DATASET, "batch_size": 1, "shuffle": False}
JOB = {"model": MODEL, "checkpoint_dir": None, "training_config": {"n_epochs": 1, "data_config": DATA}}
SOURCE = {"type": "uri", "uri": "rows.jsonl"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/supervised-fine-tune": {"job_uuid": "j", **JOB},
    "/preflight": JOB,
    "/preference-optimize": {
        "job_uuid": "j",
        "finetuned_model": MODEL,
        "algorithm_config": {"beta": 0.1},
        "training_config": JOB["training_config"],
    },
    "/job/cancel": {"job_uuid": ENDED},
    "/submit_job": {"job_id": "s", "config": {"model": MODEL, "lora": {"lora_rank": 4}}},
    "/datasets": {"dataset_id": "d", "source": SOURCE},
    "/datasets/register": {"dataset_id": "d", "url": "rows.jsonl", "dataset_schema": {}},
    "/datasets/unregister": {"dataset_id": "nobody"},
    "/datasetio/rows": {"dataset_id": "nobody", "rows": []},
    "/append-rows": {"dataset_id": "nobody", "rows": []},
    "/append-rows/{dataset_id}": {"rows": []},
    "/models": {"model_id": "m", "provider_model_id": MODEL, "provider_id": None},
    "/models/register": {"model_id": "m", "provider_model_id": MODEL, "provider_id": None},
    "/models/unregister": {"model_id": "nobody"},
    "/chat/completions": CHAT,
    "/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 1},
    "/inference/chat-completion": {"model_id": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/inference/completion": {"model_id": MODEL, "content": "hi"},
}
NAMES = {
    "job_uuid", "job_id", "model", "checkpoint_dir", "dataset_id", "validation_dataset_id", "uri", "url", "model_id",
    "provider_model_id", "provider_id", "finetuned_model", "lora_adapter_path",
}  # fmt: skip
PATHS = {"uri", "url", "checkpoint_dir"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedStack]:
    with fuzzed_stack(tmp_path_factory.mktemp("paths")) as made:
        yield made


def paths(stack: FuzzedStack) -> list[str]:
    """Ways to say where a secret lies, and what is no file of anyone's."""
    outside, data = str(stack.outside), str(stack.data)
    return [
        f"{outside}/secret.jsonl",
        f"file://{outside}/secret.jsonl",
        f"FILE://localhost{outside}/secret.csv",
        f"file:{outside}/secret.json",
        f"file:////{outside}/secret.json",
        "../outside/secret.jsonl",
        f"{data}/../outside/secret.jsonl",
        f"file://{data}/%2e%2e/outside/secret.jsonl",
        f"file://{data}/..%2foutside%2fsecret.jsonl",
        "link.jsonl",
        "folder/secret.jsonl",
        f"{data}/folder/../outside/secret.jsonl",
        "rows.jsonl\0",
        "../outside/secret.jsonl\0rows.jsonl",
        "\uff0e\uff0e/outside/secret.jsonl",
        "/proc/self/environ",
        "/proc/self/cwd/rows.jsonl",
        "/dev/stdin.jsonl",
        "~/rows.jsonl",
        "link",
        outside,
        f"{stack.home}/models/link",
        "http://169.254.169.254/rows.jsonl",
        "ftp://localhost/rows.jsonl",
        "huggingface://datasets/../../outside",
        "data:text/csv;base64,%%%",
        "data:",
        "x" * 5000 + ".jsonl",
    ]


def changes(body: Any, stack: FuzzedStack) -> Iterator[Any]:
    """`body` with one of its names changed, to each of what may be sent there."""
    for key, value in body.items():
        if key in NAMES:
            for name in [*IDS, *(paths(stack) if key in PATHS else ())]:
                yield {**body, key: name}
        elif isinstance(value, dict):
            for inner in changes(value, stack):
                yield {**body, key: inner}


def requests_of(label: str, stack: FuzzedStack) -> Iterator[tuple[str, bytes]]:
    """Targets and bodies for an operation."""
    _, _, path = label.partition(" ")
    parameters = stack.app.openapi()["paths"][path][label.split()[0].lower()].get("parameters", [])
    names = [p["name"] for p in parameters if p["in"] == "path"]
    asked = [p["name"] for p in parameters if p["in"] == "query" and "string" in json.dumps(p["schema"])]
    tails = [tail for tail in BODIES if path.endswith(tail)] if label.startswith("POST") else []
    body = BODIES[max(tails, key=len)] if tails else {}
    known = {
        "job_uuid": ENDED,
        "job_id": "nobody",
        "step": STEP,
        "name": FILE,
        "dataset_id": "nobody",
        "model_id": "nobody",
        "provider_id": "p",
    }
    plain = path.format(**known)
    for name in names:
        for value in IDS:
            for written in spellings(value):
                yield path.format(**{**known, name: written}), json.dumps(body).encode()
    for name in asked:
        for value in IDS:
            yield f"{plain}?{name}={quote(value, safe='', errors='surrogatepass')}", b""
    for changed in changes(body, stack):
        yield plain, json.dumps(changed).encode()


def spellings(value: str) -> Iterator[str]:
    """A value as it may stand in a path."""
    yield quote(value, safe="/", errors="surrogatepass")
    yield quote(value, safe="", errors="surrogatepass")
    if len(value) < 100:
        yield quote(quote(value, safe="", errors="surrogatepass"), safe="")
        yield "".join(f"%{byte:02X}" for byte in value.encode(errors="surrogatepass"))


def check(answer: Answer, target: str, body: bytes) -> None:
    said = answer.body.decode(errors="replace")
    not_supported = answer.status == 501 and '"not_supported"' in said
    assert answer.status < 500 or not_supported, (target[:200], body[:500], said[:300])
    assert answer.status >= 200, target[:200]
    assert SECRET not in said, (target[:200], body[:500])
    assert "root:x:" not in said
    assert all("\n" not in value for _, value in answer.headers)
    assert "x-injected" not in dict(answer.headers)


def folders(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.mark.parametrize("label", ASKING)
def test_no_name_leads_out(stack: FuzzedStack, label: str):
    method = label.split()[0]
    before = stack.tree_outside()
    with watching(stack):
        for target, body in requests_of(label, stack):
            check(stack.call(method, target, body, {"content-type": "application/json"}), target, body)
    assert stack.opened == []
    assert stack.tree_outside() == before
    assert folders(stack.home.parent) == {"home", "data", "outside"}
    assert folders(stack.data) == {"rows.jsonl", "link.jsonl", "folder"}


def test_the_watch_sees_what_it_is_there_for(stack: FuzzedStack):
    with watching(stack):
        (stack.data / "link.jsonl").read_text()
        list(stack.outside.iterdir())
    assert stack.opened == [str(stack.outside / "secret.jsonl"), str(stack.outside)]
    stack.opened.clear()
    before = stack.tree_outside()
    (stack.outside / "new").write_text("")
    assert stack.tree_outside() != before
    (stack.outside / "new").unlink()


def test_every_operation_with_a_body_is_tried(stack: FuzzedStack):
    posts = {path for path, method, operation in operations(stack.app.openapi()) if "requestBody" in operation}
    assert {path for path in posts if not path.endswith(tuple(BODIES))} == set()
    assert {f"POST {path}" for path in posts} <= set(ASKING)


def test_what_was_accepted_lies_inside(stack: FuzzedStack):
    """Runs behind the tests above, on what they left."""
    listed = json.loads(stack.call("GET", "/v1beta/datasets").body)["data"]
    assert DATASET in [dataset["identifier"] for dataset in listed]
    for dataset in listed:
        name = quote(dataset["identifier"])
        check(stack.call("GET", f"/v1beta/datasetio/iterrows/{name}"), name, b"")
    store = JobStore(stack.stack.database)
    accepted = [job for job in store.summaries() if job.job_uuid not in (ENDED, WAITING)]
    assert accepted  # a strange id is not always a wrong one
    for job in accepted:
        base = Path(JobSpec.model_validate(store.get(job.job_uuid).spec).model.base_dir).resolve()
        assert base.is_relative_to(stack.home.resolve()), job.job_uuid
    files = [path for path in stack.home.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.relative_to(stack.home).parts[0] for path in files} <= {
        "postgrad.db", "postgrad.db-shm", "postgrad.db-wal", ".lock", "datasets", "models", "jobs",
    }  # fmt: skip


RAW = [
    b"/v1/../../outside/secret.json",
    b"//outside/secret.json",
    b"/v1//models//..",
    b"http://localhost/v1/models/../../etc/passwd",
    b"/v1/models/%zz%",
    b"/v1/models/%ff%fe",
    b"/v1/models/%00",
    b"/v1/models/a%0d%0ax-injected:%201",
    b"/v1alpha/post-training/jobs/lab/ended/checkpoints/4/files/%2e%2e/%2e%2e/manifest.json",
    b"/v1alpha/post-training/jobs/lab/ended/checkpoints/4/files/../../../../../outside/secret.json",
    b"/v1alpha/post-training/jobs/lab/ended/checkpoints/4/files/link",
    b"/v1alpha/post-training/jobs/lab/ended/checkpoints/-1/files/adapter",
    b"/v1alpha/post-training/jobs/lab/ended/checkpoints/99999999999999999999/files",
    b"/docs/../v1/models",
    b"*",
    b"?job_uuid=..",
    b"/" + b"a/" * 20_000,
]


def raw_answer(url: str, method: bytes, target: bytes) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as connection:
        head = method + b" " + target + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        connection.sendall(head + b"content-length: 0\r\n\r\n")
        connection.settimeout(10)
        parts_read = iter(lambda: connection.recv(65536), b"")
        try:
            return b"".join(parts_read)
        except ConnectionResetError:
            return b""


def test_no_target_on_the_wire_leads_out(stack: FuzzedStack):
    with watching(stack), serving(stack.app) as url:
        for target in RAW:
            for method in (b"GET", b"HEAD", b"DELETE", b"POST", b"OPTIONS"):
                answer = raw_answer(url, method, target)
                status = int(answer.split()[1]) if answer else 400
                assert 200 <= status < 500, (method, target[:100], answer[:300])
                assert SECRET.encode() not in answer
                assert b"\nx-injected" not in answer
        assert raw_answer(url, b"GET", b"/v1/health").startswith(b"HTTP/1.1 200")
    assert stack.opened == []
