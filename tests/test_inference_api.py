"""The inference API over HTTP: the real OpenAI client, a real worker process, the real model catalog."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from apis.errors import PostgradError, Unavailable
from apis.inference import ChatCompletionRequest, CompletionRequest, Inference
from apis.inference.routes import create_router
from post_training.catalog.datasets import DatasetCatalog
from post_training.catalog.models import ModelCatalog
from post_training.jobs.database import Database
from post_training.jobs.scheduler import local_scheduler
from providers.inference.channel import WorkerProcess
from providers.inference.config import TransformersInferenceConfig
from providers.inference.provider import TransformersInference, get_provider_impl
from providers.inference.wire import GenerateRequest, ModelFiles
from providers.spec import ProviderDeps
from tests.tiny_llama import CONTEXT, save_random_adapter, save_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BASE, TUNED, NO_TEMPLATE = "acme/tiny", "acme/tiny-sft-job-0", "acme/text-only"
HELLO: Any = [{"role": "user", "content": "Hello there"}]
LONG: dict[str, Any] = {"temperature": 0, "max_tokens": CONTEXT - 100}


class Stack:
    """A server with one provider, and clients of it."""

    def __init__(self, url: str, impl: TransformersInference) -> None:
        self.url, self.impl = url, impl
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
        self.http = httpx.Client(base_url=f"{url}/v1", timeout=60)

    @property
    def pending(self) -> int:
        worker = self.impl.pool.worker
        return worker.pending if worker else 0

    def chat(self, model: str = BASE, **options: Any) -> str:
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": 30} | options
        answer = self.openai.chat.completions.create(model=model, messages=HELLO, **settings)
        return answer.choices[0].message.content or ""


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def make_app(impl: TransformersInference) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI):
        yield
        await impl.shutdown()

    app = FastAPI(lifespan=lifespan)
    app.include_router(create_router(impl), prefix="/v1")

    @app.exception_handler(PostgradError)
    async def ours(_: Request, error: PostgradError) -> JSONResponse:
        body = {"message": error.message, "code": error.code, "param": error.param}
        return JSONResponse({"error": body}, error.http_status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"error": {"message": json.dumps(error.errors(), default=str)}}, 400)

    return app


def make_catalog(home: Path) -> ModelCatalog:
    home.mkdir(exist_ok=True)
    database = Database(f"sqlite:///{home}/store.db")
    database.migrate()
    catalog = ModelCatalog(database, home)
    base = save_tiny_llama(home / "base")
    checkpoint = home / "jobs/job/checkpoints/1"
    save_random_adapter(base, checkpoint / "adapter", seed=1)
    with database.session() as session:
        catalog.add_base(session, BASE, base, {})
        catalog.add_base(session, NO_TEMPLATE, save_tiny_llama(home / "text", chat_template=None), {})
        catalog.add_checkpoint(
            session,
            identifier=TUNED,
            job_uuid="job",
            epoch=0,
            step=1,
            directory=checkpoint,
            model=BASE,
            base_identifier=BASE,
            base_dir=base,
        )
        catalog.mark_job_completed(session, "job")
    return catalog


async def make_impl(home: Path, **config: Any) -> TransformersInference:
    catalog = make_catalog(home)
    deps = ProviderDeps(
        provider_id="transformers",
        home=home,
        database=catalog.database,
        models=catalog,
        datasets=DatasetCatalog(catalog.database, home),
        scheduler=local_scheduler(catalog.database, home),
        apis={},
    )
    return await get_provider_impl(TransformersInferenceConfig(device="cpu", dtype="fp32", threads=1, **config), deps)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    impl = asyncio.run(make_impl(tmp_path_factory.mktemp("home")))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(impl), log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        until(lambda: server.started)
        stack = Stack(f"http://127.0.0.1:{bound.getsockname()[1]}", impl)
        yield stack
        stack.openai.close()
        stack.http.close()
        worker = impl.pool.worker
        began = time.monotonic()
        server.should_exit = True
        thread.join()
    assert time.monotonic() - began < 10
    assert worker is not None
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_the_provider_offers_the_whole_protocol(stack: Stack):
    assert isinstance(stack.impl, Inference)


def test_a_chat_completion_has_openais_shape(stack: Stack):
    answer = stack.openai.chat.completions.create(model=BASE, messages=HELLO, temperature=0, max_tokens=30)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", BASE)
    assert abs(answer.created - time.time()) < 60
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 30
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30


def test_a_checkpoint_answers_unlike_its_base_and_its_alias_like_itself(stack: Stack):
    base, tuned = stack.chat(BASE), stack.chat(TUNED)
    assert base != tuned
    assert stack.chat(BASE) == base
    assert stack.chat("acme/tiny-sft-0") == tuned


def test_a_stream_says_what_the_whole_answer_says(stack: Stack):
    chunks = list(
        stack.openai.chat.completions.create(
            model=TUNED,
            messages=HELLO,
            temperature=0,
            max_tokens=30,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *pieces, usage = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    assert len(pieces) > 10
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == stack.chat(TUNED)
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 30
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_on_the_wire_is_server_sent_events_that_end_in_done(stack: Stack):
    body = {"model": BASE, "messages": HELLO, "stream": True, "temperature": 0, "max_tokens": 5}
    answer = stack.http.post("/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length", "logprobs": None}
    assert not any("usage" in chunk for chunk in chunks)


def test_completions_answer_every_prompt_whole_and_streamed(stack: Stack):
    prompts = ["The quick brown", "A stack of"]
    options: dict[str, Any] = {"model": BASE, "temperature": 0, "max_tokens": 12}
    whole = stack.openai.completions.create(prompt=prompts, **options)
    alone = [stack.openai.completions.create(prompt=prompt, **options) for prompt in prompts]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert [choice.text for choice in whole.choices] == [answer.choices[0].text for answer in alone]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    streamed = ["", ""]
    for chunk in stack.openai.completions.create(prompt=prompts, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in whole.choices]


def test_an_answer_can_be_sent_back_as_it_came_with_text_parts_and_a_developer_message(stack: Stack):
    first = stack.openai.chat.completions.create(model=BASE, messages=HELLO, temperature=0, max_tokens=8)
    asked: Any = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
        first.choices[0].message,
        {"role": "user", "content": "And now?"},
    ]
    plain: Any = [
        {"role": "system", "content": "Be brief"},
        HELLO[0],
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    answers = [
        stack.openai.chat.completions.create(model=BASE, messages=messages, temperature=0, max_tokens=8)
        for messages in (asked, plain)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage


def test_a_stop_string_and_the_newer_limit_act(stack: Stack):
    whole = stack.chat()
    stop = whole[6:9]
    assert stack.chat(stop=stop) == whole[: whole.index(stop)]
    answer = stack.openai.chat.completions.create(
        model=BASE, messages=HELLO, temperature=0, max_completion_tokens=3, stop=[stop, "none"]
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3


def test_a_seed_makes_sampling_repeatable(stack: Stack):
    assert stack.chat(temperature=1, seed=5) == stack.chat(temperature=1, seed=5)
    assert stack.chat(temperature=1, seed=5) != stack.chat(temperature=1, seed=6)


def test_an_unknown_model_is_a_404_streamed_or_not(stack: Stack):
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError, match="there is no model 'acme/none'"):
            stack.openai.chat.completions.create(model="acme/none", messages=HELLO, stream=stream)


def test_a_prompt_over_the_context_is_a_400_with_the_numbers_streamed_or_not(stack: Stack):
    messages: Any = [{"role": "user", "content": "é" * 2 * CONTEXT}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=rf"takes at most {CONTEXT}") as caught:
            stack.openai.chat.completions.create(model=BASE, messages=messages, stream=stream)
        assert caught.value.param == "messages"


def test_chat_with_a_model_without_a_template_is_a_400_and_completion_works(stack: Stack):
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        stack.chat(NO_TEMPLATE)
    answer = stack.openai.completions.create(model=NO_TEMPLATE, prompt="The quick", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


def test_tools_that_the_template_would_not_show_are_a_400(stack: Stack):
    tools: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
    with pytest.raises(openai.BadRequestError, match="tools"):
        stack.chat(tools=tools)
    assert stack.chat(tools=tools, tool_choice="none") == stack.chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 0),
        ("n", 2),
        ("logprobs", True),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("store", True),
        ("max_tokens", 0),
        ("temperature", 2.5),
        ("top_p", 1.5),
        ("stop", [""]),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_what_a_chat_completion_cannot_do_is_a_400_that_names_the_field(stack: Stack, field: str, value: Any):
    answer = stack.http.post("/chat/completions", json={"model": BASE, "messages": HELLO, field: value})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [1, 2]),
        ("prompt", [[1], [2]]),
        ("prompt", []),
        ("best_of", 2),
        ("echo", True),
        ("logprobs", 0),
        ("suffix", "x"),
    ],
)
def test_what_a_completion_cannot_do_is_refused_by_name(field: str, value: Any):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": BASE, "prompt": "x", field: value})
    assert caught.value.errors()[0]["loc"][0] == field


def test_fields_that_ask_for_nothing_are_accepted():
    request = ChatCompletionRequest.model_validate(
        {
            "model": BASE,
            "messages": HELLO,
            "n": 1,
            "logprobs": False,
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "logit_bias": {},
            "response_format": {"type": "text"},
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "user": "someone",
            "metadata": {"run": "1"},
            "store": False,
            "temperature": None,
            "stop": None,
            "service_tier": "auto",
        }
    )
    assert request.stop is None
    assert not request.include_usage


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least 1 item"),
        ([{"role": "user"}], "needs `content`"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "type 'image_url'"),
        ([{"role": "robot", "content": "x"}], "'assistant'"),
        ([{"role": "user", "content": "x", "colour": "red"}], "colour"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_with_the_reason(messages: list[Any], problem: str):
    with pytest.raises(ValidationError, match=re.escape(problem)):
        ChatCompletionRequest.model_validate({"model": BASE, "messages": messages})


def test_requests_at_the_same_time_all_get_their_own_answer(stack: Stack):
    models = [BASE, TUNED] * 4
    expected = {model: stack.chat(model) for model in (BASE, TUNED)}
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(stack.chat, models)) == [expected[model] for model in models]


def test_closing_a_stream_stops_the_generation(stack: Stack):
    stream = stack.openai.chat.completions.create(model=BASE, messages=HELLO, stream=True, **LONG)
    next(iter(stream))
    assert stack.pending == 1
    stream.close()
    until(lambda: stack.pending == 0, seconds=3)
    assert_quick(stack)


def test_a_client_that_goes_away_stops_the_generation(stack: Stack):
    with pytest.raises(httpx.ReadTimeout):
        stack.http.post("/chat/completions", json={"model": BASE, "messages": HELLO} | LONG, timeout=0.5)
    until(lambda: stack.pending == 0, seconds=3)
    assert_quick(stack)


def assert_quick(stack: Stack) -> None:
    """The worker is free: a long generation, which takes seconds, does not stand before this one."""
    began = time.monotonic()
    stack.chat(max_tokens=1)
    assert time.monotonic() - began < 1.5


def test_a_worker_that_is_killed_fails_its_requests_with_503_and_the_next_one_works(stack: Stack):
    before = stack.chat()
    worker = stack.impl.pool.worker
    assert worker is not None
    with ThreadPoolExecutor(1) as pool:
        stream = stack.openai.chat.completions.create(model=BASE, messages=HELLO, stream=True, **LONG)
        next(iter(stream))
        waiting = pool.submit(stack.chat, TUNED)
        until(lambda: stack.pending == 2)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(openai.InternalServerError, match="worker was killed by SIGKILL") as caught:
            waiting.result()
        assert caught.value.status_code == 503
        with pytest.raises(openai.APIError, match="worker was killed by SIGKILL"):
            list(stream)
    assert stack.chat() == before
    assert stack.impl.pool.worker is not worker


LAUNCH = """
import asyncio
from providers.inference.channel import WorkerProcess
from providers.inference.config import TransformersInferenceConfig

async def main():
    worker = await WorkerProcess.start(TransformersInferenceConfig(), lambda: None)
    print(worker.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    """A zombie, which nobody has waited for yet, does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads process states from /proc")
def test_a_worker_ends_when_its_server_is_killed():
    with subprocess.Popen([sys.executable, "-c", LAUNCH], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert is_running(pid)
        server.kill()
    until(lambda: not is_running(pid))


@pytest.mark.parametrize("line", [b"no JSON", b"[]", b'{"generate": {}}', b"\xff"])
def test_a_worker_that_is_sent_something_unreadable_ends(line: bytes):
    code = "import time, sys; from providers.inference.worker import Inbox; Inbox(sys.stdin.buffer); time.sleep(30)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        worker.stdin.write(line + b"\n")
        worker.stdin.flush()
        assert worker.wait(20) == 1


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"text": "no number"}', '{"id": 1}', '{"id": 1, "done": {}}'])
async def test_a_worker_that_says_something_unreadable_is_stopped_and_its_request_fails(
    line: str, monkeypatch: pytest.MonkeyPatch
):
    script = f"import sys, time; sys.stdin.readline(); print({line!r}, flush=True); time.sleep(30)"
    monkeypatch.setattr("providers.inference.channel.python_module", lambda _: [sys.executable, "-c", script])
    worker = await WorkerProcess.start(TransformersInferenceConfig.model_validate({}), lambda: None)
    request = GenerateRequest(model=ModelFiles(identifier="m", weights_dir=Path()), prompt="x")
    with pytest.raises(Unavailable, match="worker was killed by SIGKILL"):
        async with asyncio.timeout(20):
            [event async for event in worker.generate(request)]
    assert worker.closed


async def test_a_worker_that_cannot_start_is_a_503_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("providers.inference.channel._environment", lambda: os.environ | {"PYTHONPATH": str(tmp_path)})
    (tmp_path / "torch.py").write_text("raise ImportError('no torch', name='torch')")
    impl = await make_impl(tmp_path / "home")
    request = ChatCompletionRequest.model_validate({"model": BASE, "messages": HELLO})
    with pytest.raises(PostgradError, match=r"inference needs torch: pip install 'postgrad\[torchtune\]'") as caught:
        await impl.chat_completion(request)
    assert caught.value.http_status == 503
    await impl.shutdown()


async def test_an_unused_worker_ends_and_a_full_queue_is_a_429(tmp_path: Path):
    impl = await make_impl(tmp_path, idle_unload_seconds=0.2, max_pending_requests=1)
    request = ChatCompletionRequest.model_validate(
        {"model": BASE, "messages": HELLO, "temperature": 0, "max_tokens": 2}
    )
    stream = impl.stream_chat_completion(request)
    await anext(stream)
    with pytest.raises(PostgradError, match="try again later") as caught:
        await impl.chat_completion(request)
    assert caught.value.http_status == 429
    worker = impl.pool.worker
    assert worker is not None
    async for _ in stream:
        pass
    async with asyncio.timeout(10):
        while impl.pool.worker is not None:
            await asyncio.sleep(0.01)
    await impl.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)
