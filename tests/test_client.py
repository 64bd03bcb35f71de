"""The typed client, sync and async, against real routers over real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from apis import errors
from apis.datasets import RegisterDatasetRequest
from apis.post_training import LoraFinetuningConfig, SupervisedFineTuneRequest, TrainingConfig
from post_training.client import AsyncStackClient, StackClient
from post_training.client import core as client_core
from post_training.client.errors import error_from_response, invalid_request
from tests.client_session import Session
from tests.in_memory_stack import BASE_MODEL, DIVERGING_MODEL, STEPS, InMemoryStack, fault, running

ROWS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"ho {n}"}]} for n in range(3)
]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for prefix in ("POSTGRAD", "LLAMA_STACK"):
        for name in ("BASE_URL", "API_KEY"):
            monkeypatch.delenv(f"{prefix}_{name}", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[InMemoryStack]:
    with running() as stack:
        yield stack


@pytest.fixture
def stack(server: InMemoryStack) -> InMemoryStack:
    server.reset()
    return server


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def session(kind: str, stack: InMemoryStack) -> Iterator[Session]:
    session = Session(kind, stack.url)
    yield session
    session.close()


@contextmanager
def connected(kind: str, url: str, **options: Any) -> Iterator[Session]:
    session = Session(kind, url, **options)
    try:
        yield session
    finally:
        session.close()


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_core, "_FIRST_DELAY", 0.01)


def register_rows(session: Session, dataset_id: str = "tickets") -> None:
    session.do(lambda client: client.datasets.register({"type": "rows", "rows": ROWS}, dataset_id=dataset_id))


def submit(session: Session, job_uuid: str = "j1", model: str = BASE_MODEL) -> None:
    register_rows(session)
    config = {"n_epochs": 1, "data_config": {"dataset_id": "tickets"}}
    session.do(
        lambda client: client.post_training.supervised_fine_tune(job_uuid=job_uuid, model=model, training_config=config)
    )


# -- every verb ------------------------------------------------------------------------------------------------------


def test_a_job_goes_from_submit_to_artifacts(session: Session):
    submit(session)
    seen: list[Any] = []
    status = session.do(
        lambda client: client.post_training.wait("j1", poll_seconds=0.001, on_status=seen.append, timeout=30)
    )
    assert status.status == "completed"
    assert seen[-1] == status
    assert list(dict.fromkeys(one.status.value for one in seen)) == ["scheduled", "in_progress", "completed"]
    assert max(one.progress.step for one in seen if one.progress) == STEPS
    artifacts = session.do(lambda client: client.post_training.artifacts("j1"))
    assert [item.identifier for item in artifacts.checkpoints] == [f"{BASE_MODEL}-sft-j1-0"]
    assert artifacts.checkpoints[0].training_metrics.validation_loss == 0.75
    jobs = session.do(lambda client: client.post_training.jobs())
    assert [(job.job_uuid, job.status, job.model) for job in jobs] == [("j1", "completed", BASE_MODEL)]


def test_logs_are_read_on_from_where_the_last_answer_ended(session: Session):
    submit(session)
    first = session.do(lambda client: client.post_training.logs("j1"))
    assert (first.log_lines, first.next) == (["job accepted"], 1)
    session.do(lambda client: client.post_training.wait("j1", poll_seconds=0.001))
    rest = session.do(lambda client: client.post_training.logs("j1", after=first.next))
    assert rest.log_lines == [*(f"step {n}" for n in range(1, STEPS + 1)), "completed: it ended"]


def test_a_cancelled_job_ends_the_wait(session: Session):
    submit(session)
    assert session.do(lambda client: client.post_training.cancel("j1")) is None
    assert session.do(lambda client: client.post_training.wait("j1", timeout=5)).status == "cancelled"
    with pytest.raises(errors.JobFailure, match="cancelled"):
        session.do(lambda client: client.post_training.wait("j1", raise_on_failure=True))


def test_a_failed_job_ends_the_wait_and_is_raised_as_its_own_error_where_asked(session: Session):
    submit(session, model=DIVERGING_MODEL)
    status = session.do(lambda client: client.post_training.wait("j1", poll_seconds=0.001))
    assert (status.status, status.error.code) == ("failed", "non_finite_loss")
    with pytest.raises(errors.NonFiniteLoss, match="'j1': the loss is not finite at step 2"):
        session.do(lambda client: client.post_training.wait("j1", raise_on_failure=True))


def test_a_wait_ends_after_its_timeout(session: Session):
    submit(session)
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match=r"did not end within 0.2 s"):
        session.do(lambda client: client.post_training.wait("j1", poll_seconds=30, timeout=0.2))
    assert time.monotonic() - began < 5


def test_a_request_object_and_its_fields_make_the_same_job(stack: InMemoryStack, session: Session):
    register_rows(session)
    request = SupervisedFineTuneRequest(
        job_uuid="j1",
        model=BASE_MODEL,
        algorithm_config=LoraFinetuningConfig(rank=4),
        training_config=TrainingConfig.model_validate({"data_config": {"dataset_id": "tickets"}}),
    )
    fields = {
        "job_uuid": "j1",
        "model": BASE_MODEL,
        "algorithm_config": {"type": "LoRA", "rank": 4},
        "training_config": {"data_config": {"dataset_id": "tickets"}},
    }
    session.do(lambda client: client.post_training.supervised_fine_tune(request))
    # Accepted a second time only because the bodies are equal.
    session.do(lambda client: client.post_training.supervised_fine_tune(**fields))
    assert stack.post_training.jobs["j1"].request == request
    with pytest.raises(errors.Conflict, match="another body"):
        session.do(lambda client: client.post_training.supervised_fine_tune(request, model=DIVERGING_MODEL))


def test_preference_optimize_reaches_its_route(session: Session):
    with pytest.raises(errors.NotSupported, match=r"beta 0.25"):
        session.do(
            lambda client: client.post_training.preference_optimize(
                job_uuid="p1", finetuned_model=BASE_MODEL, algorithm_config={"beta": 0.25}
            )
        )


def test_data_sets_are_registered_read_appended_to_and_forgotten(session: Session):
    register_rows(session, "lab/tickets.v1")
    assert [one.identifier for one in session.do(lambda client: client.datasets.list())] == ["lab/tickets.v1"]
    assert session.do(lambda client: client.datasets.get("lab/tickets.v1")).source.rows == ROWS
    session.do(lambda client: client.datasets.append("lab/tickets.v1", [{"extra": 1}]))
    page = session.do(lambda client: client.datasets.rows("lab/tickets.v1", start_index=2, limit=1))
    assert (page.data, page.has_more) == ([ROWS[2]], True)
    assert session.do(lambda client: client.datasets.rows("lab/tickets.v1")).data == [*ROWS, {"extra": 1}]
    session.do(lambda client: client.datasets.unregister("lab/tickets.v1"))
    with pytest.raises(errors.DatasetNotFound):
        session.do(lambda client: client.datasets.get("lab/tickets.v1"))


def test_a_data_set_without_an_id_gets_a_unique_one(session: Session):
    source = {"type": "uri", "uri": "data.jsonl"}
    first, second = (session.do(lambda client: client.datasets.register(source)).identifier for _ in range(2))
    assert first.startswith("dataset-")
    assert first != second


def test_models_are_listed_named_and_forgotten(session: Session):
    session.do(lambda client: client.models.register("mine", provider_model_id=BASE_MODEL, metadata={"a": 1}))
    assert [model.id for model in session.do(lambda client: client.models.list())] == [
        BASE_MODEL,
        DIVERGING_MODEL,
        "mine",
    ]
    model = session.do(lambda client: client.models.get("mine"))
    assert (model.provider_resource_id, model.metadata) == (BASE_MODEL, {"a": 1})
    session.do(lambda client: client.models.unregister("mine"))
    with pytest.raises(errors.ModelNotFound):
        session.do(lambda client: client.models.get("mine"))


def test_completions_are_answered_whole_and_streamed(session: Session):
    messages = [{"role": "user", "content": "a b c"}]
    answer = session.do(lambda client: client.inference.chat_completion(BASE_MODEL, messages, max_tokens=2))
    assert answer.choices[0].message.content == "a b"
    chunks: list[Any] = []
    session.collect(lambda client: client.inference.stream_chat_completion(BASE_MODEL, messages), chunks)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["a", "b", "c"]
    text = session.do(lambda client: client.inference.completion(BASE_MODEL, ["x", "y"]))
    assert [choice.text for choice in text.choices] == ["X", "Y"]
    pieces: list[Any] = []
    session.collect(lambda client: client.inference.stream_completion(BASE_MODEL, "x y"), pieces)
    assert [piece.choices[0].text for piece in pieces] == ["X", "Y"]


def test_an_error_within_a_stream_is_raised_after_what_came_before(session: Session):
    messages = [{"role": "user", "content": "a break c"}]
    chunks: list[Any] = []
    with pytest.raises(errors.Unavailable, match="worker is gone"):
        session.collect(lambda client: client.inference.stream_chat_completion(BASE_MODEL, messages), chunks)
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["a"]


def test_an_error_before_a_stream_is_raised_with_its_class(session: Session):
    with pytest.raises(errors.ModelNotFound):
        session.collect(
            lambda client: client.inference.stream_chat_completion("no/model", [{"role": "user", "content": "a"}]), []
        )


def test_the_stack_tells_about_itself(session: Session):
    assert session.do(lambda client: client.inspect.version()).version == "9.9.9"
    assert session.do(lambda client: client.inspect.health()).status == "OK"
    assert [one.provider_id for one in session.do(lambda client: client.inspect.providers())] == ["memory"]
    assert session.do(lambda client: client.inspect.provider("memory")).provider_type == "inline::memory"
    with pytest.raises(errors.NotFound, match="no provider 'x'"):
        session.do(lambda client: client.inspect.provider("x"))


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["status", "artifacts", "cancel", "logs", "wait", "metrics", "delete"])
def test_an_unknown_job_is_job_not_found_for_every_verb(session: Session, verb: str):
    with pytest.raises(errors.JobNotFound, match="'nope' does not exist") as caught:
        session.do(lambda client: getattr(client.post_training, verb)("nope"))
    assert caught.value.param == "job_uuid"


def test_refusals_of_the_server_keep_class_message_and_field(session: Session):
    config = {"training_config": {"data_config": {"dataset_id": "x"}}}
    for fields, expected, param in (
        ({"model": "no/model", **config}, errors.ModelNotFound, "model"),
        ({"model": BASE_MODEL, **config}, errors.DatasetNotFound, "dataset_id"),
        (config, errors.InvalidField, "model"),
    ):
        with pytest.raises(errors.PostgradError) as caught:
            session.do(lambda client, fields=fields: client.post_training.supervised_fine_tune(job_uuid="j", **fields))
        assert type(caught.value) is expected
        assert caught.value.param == param


def test_a_request_that_does_not_fit_is_refused_by_field_before_it_is_sent(stack: InMemoryStack, session: Session):
    for fields, param, message in (
        ({"training_config": {"n_epochs": 0}}, "training_config.n_epochs", "greater than or equal to 1"),
        ({"algorithm_config": {"type": "LoRA", "rank": -1}}, "algorithm_config.rank", "greater than or equal to 1"),
        ({"learning_rate": 1}, "learning_rate", "there is no such field"),
        ({"logger_config": {"a": 1}}, "logger_config", "this legacy field has no effect"),
    ):
        with pytest.raises(errors.InvalidField, match=message) as caught:
            session.do(lambda client, fields=fields: client.post_training.supervised_fine_tune(job_uuid="j", **fields))
        assert caught.value.param == param
    assert stack.requests == []


def test_a_fault_inside_a_tagged_union_is_named_without_the_tag():
    request = {"dataset_id": "d", "source": {"type": "uri", "uri": 5}, "purpose": "post-training/messages"}
    with pytest.raises(ValidationError) as fault:
        RegisterDatasetRequest.model_validate(request)
    assert fault.value.errors()[0]["loc"] == ("source", "uri", "uri")
    assert invalid_request(fault.value, request).param == "source.uri"


def test_every_code_of_the_tree_comes_back_as_its_class(kind: str, stack: InMemoryStack):
    classes = {cls.code: cls for cls in errors.error_classes()}
    assert classes["non_finite_loss"] is errors.NonFiniteLoss
    assert len(classes) == len(list(errors.error_classes()))
    with connected(kind, stack.url, max_retries=0) as session:
        for code, cls in classes.items():
            stack.faults.append(fault(cls.http_status, {"error": {"code": code, "message": f"because {code}"}}))
            with pytest.raises(errors.PostgradError, match=f"because {code}") as caught:
                session.do(lambda client: client.inspect.health())
            assert type(caught.value) is cls


def test_a_bad_row_keeps_its_place():
    body = {
        "error": {"code": "data_invalid", "message": "row 3, /messages: is empty", "row": 3, "pointer": "/messages"}
    }
    error = error_from_response(400, body)
    assert isinstance(error, errors.DataInvalid)
    assert (error.row, error.pointer, error.message) == (3, "/messages", "row 3, /messages: is empty")


@pytest.mark.parametrize(
    ("status", "body", "cls", "message"),
    [
        (404, {"detail": "Not Found"}, errors.NotFound, "Not Found"),
        (403, {"error": {"message": "no"}}, errors.Unauthorized, "no"),
        (418, {"error": "short"}, errors.BadRequest, "short"),
        (400, {"error": {"detail": {"errors": [{"loc": ["body", "a"], "msg": "bad"}]}}}, errors.BadRequest, "a: bad"),
        (422, {"detail": [{"loc": ["query", "x"], "msg": "is odd"}]}, errors.BadRequest, "query.x: is odd"),
        (400, {"error": {"code": "from_the_future", "message": "new"}}, errors.BadRequest, "new"),
        (502, None, errors.Unavailable, "the server answered HTTP 502: <h1>bad</h1>"),
        (500, {"error": None}, errors.PostgradError, "the server answered HTTP 500: <h1>bad</h1>"),
    ],
)
def test_answers_of_other_shapes_are_told_by_their_status(status: int, body: Any, cls: type, message: str):
    error = error_from_response(status, body, text="<h1>bad</h1>")
    assert type(error) is cls
    assert error.message == message


def test_an_answer_that_is_not_of_this_api_is_named(stack: InMemoryStack, session: Session):
    stack.faults.append(fault(200, {"hello": "world"}))
    with pytest.raises(errors.PostgradError, match="not what was expected; is a Postgrad server there"):
        session.do(lambda client: client.post_training.jobs())


def test_fields_of_a_newer_server_are_left_out(stack: InMemoryStack, session: Session):
    source = {"type": "rows", "rows": [], "compression": "zstd"}
    known = {"identifier": "d", "provider_resource_id": "d", "provider_id": "p", "purpose": "eval/messages-answer"}
    stack.faults.append(fault(200, {"data": [{**known, "source": source, "size": 3}], "next": None}))
    datasets = session.do(lambda client: client.datasets.list())
    read = datasets[0].model_dump()
    assert known.items() <= read.items()
    assert "size" not in read
    assert datasets[0].source.model_dump() == {"type": "rows", "rows": []}


# -- retries ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_retries")
def test_a_submit_is_sent_again_after_503_until_it_is_accepted_once(stack: InMemoryStack, session: Session):
    register_rows(session)
    stack.requests.clear()
    stack.faults.extend([fault(503), fault(503)])
    config = {"data_config": {"dataset_id": "tickets"}}
    job = session.do(
        lambda client: client.post_training.supervised_fine_tune(
            job_uuid="j1", model=BASE_MODEL, training_config=config
        )
    )
    assert job.job_uuid == "j1"
    assert len({request.body for request in stack.requests}) == 1
    assert len(stack.requests) == 3
    assert list(stack.post_training.jobs) == ["j1"]


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_transient_statuses_are_retried_and_given_up_after_max_retries(
    stack: InMemoryStack, session: Session, status: int
):
    stack.faults.extend(fault(status, {"detail": f"try {n}"}) for n in range(3))
    with pytest.raises(errors.PostgradError, match="try 2"):
        session.do(lambda client: client.inspect.health())
    assert len(stack.requests) == 3


@pytest.mark.parametrize(
    "answer",
    [(503, {"x_should_retry": "false"}), (400, {}), (404, {}), (409, {}), (429, {"retry_after": "3600"})],
)
def test_what_must_not_be_retried_is_sent_once(
    stack: InMemoryStack, session: Session, answer: tuple[int, dict[str, str]]
):
    stack.faults.append(fault(answer[0], **answer[1]))
    with pytest.raises(errors.PostgradError):
        session.do(lambda client: client.inspect.health())
    assert len(stack.requests) == 1


def test_retry_after_is_waited_for(stack: InMemoryStack, session: Session):
    stack.faults.append(fault(429, retry_after="0.3"))
    began = time.monotonic()
    session.do(lambda client: client.inspect.health())
    assert 0.3 <= time.monotonic() - began < 5


def test_retry_after_may_be_a_date():
    response = httpx.Response(503, headers={"retry-after": format_datetime(datetime.now(UTC) + timedelta(seconds=30))})
    delay = client_core.retry_delay(client_core.Call("GET", "/", lambda body: body), 0, response)
    assert delay is not None
    assert 25 < delay <= 30


def test_pauses_between_tries_double_up_to_a_limit():
    call = client_core.Call("GET", "/", lambda body: body)
    for attempt, longest in enumerate([0.5, 1, 2, 4, 8, 8]):
        delays = [client_core.retry_delay(call, attempt, httpx.Response(503)) for _ in range(50)]
        assert all(delay is not None and 0.75 * longest <= delay <= longest for delay in delays)


def test_appended_rows_are_not_sent_twice(stack: InMemoryStack, session: Session):
    register_rows(session)
    stack.requests.clear()
    stack.faults.append(fault(503, {"detail": "maybe done"}))
    with pytest.raises(errors.Unavailable, match="maybe done"):
        session.do(lambda client: client.datasets.append("tickets", [{"a": 1}]))
    assert len(stack.requests) == 1


@contextmanager
def hanging_up() -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads a request and closes the connection without an answer."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                heard.append(connection.recv(65536))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.usefixtures("quick_retries")
def test_a_lost_answer_is_asked_for_again_unless_that_could_act_twice(kind: str):
    with hanging_up() as (url, heard), connected(kind, url) as session:
        with pytest.raises(errors.Unavailable, match="cannot reach"):
            session.do(lambda client: client.post_training.cancel("j1"))
        assert len(heard) == 3
        with pytest.raises(errors.Unavailable):
            session.do(lambda client: client.datasets.append("tickets", [{"a": 1}]))
        assert len(heard) == 4


@pytest.mark.usefixtures("quick_retries")
def test_no_server_is_unavailable_with_the_way_to_start_one(kind: str):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with connected(kind, url) as session, pytest.raises(errors.Unavailable) as caught:
            session.do(lambda client: client.post_training.wait("j1"))
    assert url in caught.value.message
    assert "postgrad stack run experimental-post-training" in caught.value.message


def test_a_slow_answer_ends_after_the_timeout(kind: str):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            connected(kind, url, timeout=0.1, max_retries=0) as session,
            pytest.raises(errors.Unavailable, match=r"no answer from .* within 0.1 s"),
        ):
            session.do(lambda client: client.inspect.health())


def test_a_wait_outlives_a_short_outage(kind: str, stack: InMemoryStack):
    with connected(kind, stack.url, max_retries=0) as session:
        submit(session)
        seen: list[Any] = []

        def cut_off_once(status: Any) -> None:
            seen.append(status)
            if len(seen) == 2:
                stack.faults.append(fault(503))

        status = session.do(lambda client: client.post_training.wait("j1", poll_seconds=0.001, on_status=cut_off_once))
    assert status.status == "completed"
    assert not stack.faults


# -- settings and the wire -------------------------------------------------------------------------------------------


def test_settings_come_from_arguments_then_our_variables_then_llama_stacks(monkeypatch: pytest.MonkeyPatch):
    def found(**arguments: Any) -> tuple[str, str | None]:
        settings = client_core.Settings.resolve(
            arguments.get("base_url"), arguments.get("api_key"), timeout=1, max_retries=0
        )
        return settings.base_url, settings.api_key

    assert found() == ("http://127.0.0.1:8321", None)
    monkeypatch.setenv("LLAMA_STACK_BASE_URL", "http://legacy:1/")
    monkeypatch.setenv("LLAMA_STACK_API_KEY", "legacy")
    assert found() == ("http://legacy:1", "legacy")
    monkeypatch.setenv("POSTGRAD_BASE_URL", "http://ours:2")
    monkeypatch.setenv("POSTGRAD_API_KEY", "ours")
    assert found() == ("http://ours:2", "ours")
    assert found(base_url="https://given", api_key="mine") == ("https://given", "mine")


@pytest.mark.parametrize("url", ["localhost:8321", "ftp://host", "http://", "nonsense"])
def test_what_is_no_server_url_is_refused_with_an_example(url: str):
    with pytest.raises(errors.InvalidField, match="is not a server's URL"):
        StackClient(url)


def test_the_api_key_is_sent_as_a_bearer_token(kind: str, stack: InMemoryStack):
    stack.api_key = "secret"
    with connected(kind, stack.url, api_key="secret") as session:
        assert session.do(lambda client: client.inspect.health()).status == "OK"
    with connected(kind, stack.url, api_key="wrong") as session, pytest.raises(errors.Unauthorized):
        session.do(lambda client: client.inspect.health())


def test_ids_are_encoded_in_paths_and_keep_their_slashes(stack: InMemoryStack, session: Session):
    with pytest.raises(errors.ModelNotFound):
        session.do(lambda client: client.models.get("lab/m:v1@x"))
    assert stack.requests[-1].path == "/v1/models/lab/m%3Av1%40x"


@pytest.mark.parametrize("bad", ["../models", "", "a//b", "a b", "x?y"])
def test_an_id_that_could_reach_another_route_is_never_sent(stack: InMemoryStack, session: Session, bad: str):
    with pytest.raises(errors.InvalidField):
        session.do(lambda client: client.post_training.cancel(bad))
    assert stack.requests == []


def test_a_proxy_in_the_environment_does_not_come_between_client_and_loopback(
    monkeypatch: pytest.MonkeyPatch, kind: str, stack: InMemoryStack
):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with connected(kind, stack.url, max_retries=0) as session:
        assert session.do(lambda client: client.inspect.health()).status == "OK"


def test_the_clients_close_with_their_block(stack: InMemoryStack):
    with StackClient(stack.url) as client:
        assert client.base_url == stack.url
        client.inspect.health()
    with pytest.raises(RuntimeError, match="closed"):
        client.inspect.health()

    async def use() -> None:
        async with AsyncStackClient(stack.url) as client:
            assert client.base_url == stack.url
            await client.inspect.health()

    asyncio.run(use())


def test_both_clients_have_the_same_verbs():
    sync, other = StackClient("http://host"), AsyncStackClient("http://host")
    for name in ("post_training", "datasets", "models", "inference", "inspect"):
        verbs = [verb for verb in dir(getattr(sync, name)) if not verb.startswith("_")]
        assert verbs == [verb for verb in dir(getattr(other, name)) if not verb.startswith("_")]
        assert verbs
    sync.close()


def test_the_client_imports_neither_torch_nor_the_server():
    code = "import post_training.client, sys, json; print(json.dumps(sorted(sys.modules)))"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(listed.stdout)}
    assert "httpx" in loaded
    assert not loaded & {"torch", "transformers", "datasets", "numpy", "sqlalchemy", "uvicorn", "distributions"}
