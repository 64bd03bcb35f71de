"""`StackClient` and `AsyncStackClient`: what users import."""

from __future__ import annotations

from types import TracebackType

from post_training.client import async_resources, resources
from post_training.client.core import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT, Settings
from post_training.client.transport import AsyncTransport, SyncTransport


class StackClient:
    """A typed client of one stack.

        with StackClient("http://127.0.0.1:8321") as client:
            job = client.post_training.supervised_fine_tune(
                job_uuid="tickets-1", model="my-model", training_config={"data_config": {"dataset_id": "tickets"}}
            )
            client.post_training.wait(job.job_uuid, raise_on_failure=True)

    Connection errors and the statuses 408, 429 and 5xx are retried `max_retries` times with growing pauses (or as
    Retry-After asks) where a request may be sent twice; never against `x-should-retry: false`. Everything that goes
    wrong is raised as the `PostgradError` with the server's code.

    Args:
        base_url: None: `POSTGRAD_BASE_URL`, else `LLAMA_STACK_BASE_URL`, else `http://127.0.0.1:8321`.
        api_key: sent as a bearer token. None: `POSTGRAD_API_KEY`, else `LLAMA_STACK_API_KEY`, else none.
        timeout: seconds for one attempt of one request.
        max_retries: further attempts after the first.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        self._transport = SyncTransport(Settings.resolve(base_url, api_key, timeout, max_retries))
        self.post_training = resources.PostTrainingResource(self._transport)
        self.datasets = resources.DatasetsResource(self._transport)
        self.models = resources.ModelsResource(self._transport)
        self.inference = resources.InferenceResource(self._transport)
        self.inspect = resources.InspectResource(self._transport)

    @property
    def base_url(self) -> str:
        return self._transport.settings.base_url

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> StackClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncStackClient:
    """`StackClient` with awaitable verbs; streams are async iterators. Use it within one event loop."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_retries: int = DEFAULT_MAX_RETRIES,
    ) -> None:
        self._transport = AsyncTransport(Settings.resolve(base_url, api_key, timeout, max_retries))
        self.post_training = async_resources.PostTrainingResource(self._transport)
        self.datasets = async_resources.DatasetsResource(self._transport)
        self.models = async_resources.ModelsResource(self._transport)
        self.inference = async_resources.InferenceResource(self._transport)
        self.inspect = async_resources.InspectResource(self._transport)

    @property
    def base_url(self) -> str:
        return self._transport.settings.base_url

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> AsyncStackClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
