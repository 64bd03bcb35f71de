"""A Llama Stack of 0.1.8 to 0.6.1 as the server that trains: its routes, its bodies, and what it does not have.

It tells nothing but a job's status, so events are told from that: `history` makes them of one status, always with the
same numbers, so that a reader can go on where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from apis.common import check_identifier
from apis.datasets.models import Row
from apis.errors import BadRequest, JobNotFound, NotFound, NotSupported, PostgradError
from apis.post_training.models import (
    CheckpointFile,
    JobEvent,
    JobEventKind,
    JobStatus,
    PostTrainingJob,
    PostTrainingJobLogStream,
    PostTrainingJobMetricsResponse,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    PreflightRequest,
    SupervisedFineTuneRequest,
)
from apis.post_training.reports import PreflightReport
from post_training.client.core import Call, parse_as, parse_nothing
from post_training.client.transport import AsyncTransport
from post_training.job_views import log_line
from providers.remote_stack.config import RemoteStackConfig
from providers.remote_stack.llama_stack_bodies import fine_tune_body, preference_body
from providers.remote_stack.server import settings_of


@dataclass(frozen=True)
class Routes:
    """Where a generation of Llama Stack has what is asked of it.

    Attributes:
        flat: jobs are named in the query or body, not in the path.
    """

    jobs: str
    datasets: str
    flat: bool


ROUTES = {
    "llama-stack-0.1": Routes("/v1/post-training", "/v1/datasets", flat=True),
    "llama-stack-0.3": Routes("/v1alpha/post-training", "/v1beta/datasets", flat=True),
    "llama-stack-0.6": Routes("/v1alpha/post-training", "/v1beta/datasets", flat=False),
}


class LlamaStackServer:
    """See `RemoteServer`."""

    def __init__(self, config: RemoteStackConfig, routes: Routes) -> None:
        self._routes, self._poll_seconds = routes, config.poll_seconds
        self._transport = AsyncTransport(settings_of(config))

    async def fine_tune(self, request: SupervisedFineTuneRequest) -> str:
        return await self._submit("supervised-fine-tune", fine_tune_body(request))

    async def preference_optimize(self, request: PreferenceOptimizeRequest) -> str:
        return await self._submit("preference-optimize", preference_body(request))

    async def _submit(self, verb: str, body: dict[str, Any]) -> str:
        # Not sent again where an answer is lost: the second would be refused, since the id is taken.
        path, parse = f"{self._routes.jobs}/{verb}", parse_as(PostTrainingJob)
        return (await self._transport.send(Call("POST", path, parse, body=body, idempotent=False))).job_uuid

    async def preflight(self, request: PreflightRequest) -> PreflightReport:
        raise _lacks("preflight")

    async def has_rows(self, dataset_id: str) -> bool:
        path = f"{self._routes.datasets}/{_quoted(dataset_id)}"
        try:
            # null from servers that have no such data set, a 400 or 404 from others
            return await self._transport.send(Call("GET", path, lambda body: body is not None))
        except (NotFound, BadRequest):
            return False

    async def register_rows(self, dataset_id: str, rows: list[Row]) -> None:
        source = {"type": "rows", "rows": rows}
        body = {"purpose": "post-training/messages", "source": source, "dataset_id": dataset_id}
        await self._transport.send(Call("POST", self._routes.datasets, parse_nothing, body=body))

    async def status(self, job: str) -> PostTrainingJobStatusResponse:
        call = self._job_call("GET", job, "status", lambda body: body)
        try:
            return read_status(job, await self._transport.send(call))
        except BadRequest as error:
            if "not found" in error.message.lower():  # no release of it answered with 404
                raise _unknown(job) from None
            raise

    async def cancel(self, job: str) -> None:
        await self._transport.send(self._job_call("POST", job, "cancel", parse_nothing))

    async def delete(self, job: str) -> None:
        raise _lacks("deletion of jobs")

    async def logs(self, job: str, after: int, tail: int | None) -> PostTrainingJobLogStream:
        told = history(await self.status(job))
        chosen = [event for event in told if event.id > after] if tail is None else told[len(told) - tail :]
        lines = [log_line(event.at, event.message) for event in chosen]
        return PostTrainingJobLogStream(job_uuid=job, log_lines=lines, next=chosen[-1].id if chosen else after)

    async def metrics(self, job: str, after_step: int, limit: int) -> PostTrainingJobMetricsResponse:
        raise _lacks("numbers of single steps")

    async def events(self, job: str, after: int) -> AsyncIterator[JobEvent]:
        while True:
            status = await self.status(job)
            for event in history(status):
                if event.id > after:
                    after = event.id
                    yield event
            if status.status.terminal:
                return
            await asyncio.sleep(self._poll_seconds)

    async def files(self, job: str, step: int) -> list[CheckpointFile]:
        raise _lacks("download of checkpoints; they lie on its machine, where `path` says")

    async def download(self, job: str, step: int, file: CheckpointFile, to: Path) -> None:
        raise _lacks("download of checkpoints")

    async def close(self) -> None:
        await self._transport.close()

    def _job_call(self, method: str, job: str, verb: str, parse: Any) -> Call[Any]:
        if not self._routes.flat:
            return Call(method, f"{self._routes.jobs}/jobs/{_quoted(job)}/{verb}", parse)
        path, named = f"{self._routes.jobs}/job/{verb}", {"job_uuid": job}
        return Call(method, path, parse, params=named) if method == "GET" else Call(method, path, parse, body=named)


def read_status(job: str, answer: Any) -> PostTrainingJobStatusResponse:
    """A status as a Llama Stack tells it, under the id that was asked for.

    It numbers checkpoints by epochs alone, so `step` is the epoch's place, from 1. A status that is not one of ours is
    `scheduled`: what another service behind it calls a job that it has not begun.

    Raises:
        JobNotFound: the answer is null, as releases before 0.2.3 say it.
        PostgradError: it is no status.
    """
    if answer is None:
        raise _unknown(job)
    if not isinstance(answer, dict):
        raise PostgradError("the other server's answer is no status of a job")
    known = answer.get("status") in list(JobStatus)
    checkpoints = [
        {**one, "post_training_job_id": job, "step": one.get("step") or (one.get("epoch") or 0) + 1}
        for one in answer.get("checkpoints") or []
        if isinstance(one, dict)
    ]
    status = answer["status"] if known else JobStatus.scheduled.value
    parse = parse_as(PostTrainingJobStatusResponse)
    return parse({**answer, "job_uuid": job, "status": status, "checkpoints": checkpoints})


def history(status: PostTrainingJobStatusResponse) -> list[JobEvent]:
    """What a status tells of how the job came there, as events numbered from 1."""
    told: list[tuple[Any, JobEventKind, str, int | None]] = [
        (status.scheduled_at, JobEventKind.status, JobStatus.scheduled, None)
    ]
    if status.started_at is not None:
        told.append((status.started_at, JobEventKind.status, JobStatus.in_progress, None))
    for one in status.checkpoints:
        told.append((one.created_at, JobEventKind.checkpoint, f"checkpoint {one.identifier}", one.step))
    if status.status.terminal:
        told.append((status.completed_at, JobEventKind.status, status.status, None))
    return [
        JobEvent(id=number, at=at, kind=kind, message=message, step=step, data=_data(kind, message))
        for number, (at, kind, message, step) in enumerate(told, start=1)
        if at is not None
    ]


def _data(kind: JobEventKind, message: str) -> dict[str, Any] | None:
    return {"status": message} if kind is JobEventKind.status else None


def _quoted(identifier: str) -> str:
    return quote(check_identifier(identifier), safe="/")


def _unknown(job: str) -> JobNotFound:
    return JobNotFound(f"the other server has no job {job!r}", param="job_uuid")


def _lacks(what: str) -> NotSupported:
    return NotSupported(f"the server behind this provider is a Llama Stack, which has no {what}")
