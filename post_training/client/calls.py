"""Every verb of a stack as a `Call`: its route, its body, and the type of its answer."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from apis.datasets.models import (
    AppendRowsRequest,
    Dataset,
    DatasetPurpose,
    DataSource,
    IterrowsResponse,
    ListDatasetsResponse,
    RegisterDatasetRequest,
    Row,
)
from apis.inference.models import ChatCompletion, ChatCompletionChunk, Completion
from apis.inspect.models import HealthInfo, ListProvidersResponse, ProviderInfo, VersionInfo
from apis.models.models import ListModelsResponse, Model, RegisterModelRequest
from apis.post_training.models import (
    CheckpointFile,
    CheckpointFilesResponse,
    JobStatus,
    JobSummary,
    ListOrder,
    ListPostTrainingJobsResponse,
    PostTrainingJob,
    PostTrainingJobArtifactsResponse,
    PostTrainingJobLogStream,
    PostTrainingJobMetricsResponse,
    PostTrainingJobStatusResponse,
    PreferenceOptimizeRequest,
    PreflightRequest,
    SupervisedFineTuneRequest,
)
from apis.post_training.reports import PreflightReport
from post_training.client.core import Call, ModelT, parse_as, parse_nothing, path_id
from post_training.client.errors import invalid_request

Rows = list[Row]
_JOBS = "/v1alpha/post-training/jobs"
# All rows are read before the answer; the server gives up earlier than this.
PREFLIGHT_PATIENCE_SECONDS = 1000.0
# The server says something every 15 s at least.
EVENTS_PATIENCE_SECONDS = 45.0


def build_request(model: type[ModelT], request: ModelT | None, fields: dict[str, Any]) -> ModelT:
    """`request`, or one made of `fields`. Raises InvalidField with the first fault; nothing is sent then."""
    if request is not None and not fields:
        return request
    content = {**(request.model_dump() if request is not None else {}), **fields}
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise invalid_request(error, content) from None


def _json(request: BaseModel) -> Any:
    # Defaults included, so that a request means the same on a server whose defaults differ.
    return request.model_dump(mode="json")


def supervised_fine_tune(request: SupervisedFineTuneRequest) -> Call[PostTrainingJob]:
    path = "/v1alpha/post-training/supervised-fine-tune"
    return Call("POST", path, parse_as(PostTrainingJob), body=_fine_tune(request))


def preflight(request: PreflightRequest) -> Call[PreflightReport]:
    path, body = "/v1alpha/post-training/preflight", _fine_tune(request)
    return Call("POST", path, parse_as(PreflightReport), body=body, patience=PREFLIGHT_PATIENCE_SECONDS)


def _fine_tune(request: SupervisedFineTuneRequest | PreflightRequest) -> Any:
    body = _json(request)
    if (algorithm := request.algorithm_config) is not None:
        # Without defaults: what is left out here is taken from the adapter where training goes on from one.
        body["algorithm_config"] = {"type": algorithm.type, **algorithm.model_dump(mode="json", exclude_unset=True)}
    return body


def preference_optimize(request: PreferenceOptimizeRequest) -> Call[PostTrainingJob]:
    path = "/v1alpha/post-training/preference-optimize"
    return Call("POST", path, parse_as(PostTrainingJob), body=_json(request))


def list_jobs(status: JobStatus | str | None) -> Call[list[JobSummary]]:
    parse = parse_as(ListPostTrainingJobsResponse)
    return Call("GET", _JOBS, lambda body: parse(body).data, params={"status": status})


def jobs_page(
    limit: int, after: str | None, order: ListOrder | str, status: JobStatus | str | None
) -> Call[ListPostTrainingJobsResponse]:
    params = {"limit": limit, "after": after, "order": order, "status": status}
    return Call("GET", _JOBS, parse_as(ListPostTrainingJobsResponse), params=params)


def _job(job_uuid: str, verb: str) -> str:
    return f"{_JOBS}/{path_id(job_uuid, param='job_uuid')}/{verb}"


def job_status(job_uuid: str) -> Call[PostTrainingJobStatusResponse]:
    return Call("GET", _job(job_uuid, "status"), parse_as(PostTrainingJobStatusResponse))


def job_artifacts(job_uuid: str) -> Call[PostTrainingJobArtifactsResponse]:
    return Call("GET", _job(job_uuid, "artifacts"), parse_as(PostTrainingJobArtifactsResponse))


def cancel_job(job_uuid: str) -> Call[None]:
    return Call("POST", _job(job_uuid, "cancel"), parse_nothing)


def delete_job(job_uuid: str) -> Call[None]:
    return Call("DELETE", f"{_JOBS}/{path_id(job_uuid, param='job_uuid')}", parse_nothing)


def job_logs(job_uuid: str, after: int | None, tail: int | None) -> Call[PostTrainingJobLogStream]:
    params = {"after": after, "tail": tail}
    return Call("GET", _job(job_uuid, "logs"), parse_as(PostTrainingJobLogStream), params=params)


def job_metrics(job_uuid: str, after_step: int, limit: int) -> Call[PostTrainingJobMetricsResponse]:
    params = {"after_step": after_step, "limit": limit}
    return Call("GET", _job(job_uuid, "metrics"), parse_as(PostTrainingJobMetricsResponse), params=params)


def job_events(job_uuid: str, after: int) -> Call[None]:
    headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Last-Event-ID": str(after)}
    return Call("GET", _job(job_uuid, "events"), parse_nothing, headers=headers, patience=EVENTS_PATIENCE_SECONDS)


def checkpoint_files(job_uuid: str, step: int) -> Call[list[CheckpointFile]]:
    parse = parse_as(CheckpointFilesResponse)
    return Call("GET", _job(job_uuid, f"checkpoints/{step}/files"), lambda body: parse(body).data)


def checkpoint_file(job_uuid: str, step: int, file: CheckpointFile, offset: int) -> Call[None]:
    """The bytes of `file` from `offset` on; all of them where the server has others by now."""
    headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
    if offset:
        headers |= {"Range": f"bytes={offset}-", "If-Range": f'"{file.sha256}"'}
    path = _job(job_uuid, f"checkpoints/{step}/files/{quote(file.name)}")
    return Call("GET", path, parse_nothing, headers=headers)


def register_dataset(
    source: DataSource | dict[str, Any], dataset_id: str | None, purpose: DatasetPurpose | str, metadata: Any
) -> Call[Dataset]:
    fields = {
        # Named here rather than by the server, so that a retry after a lost answer registers nothing twice.
        "dataset_id": dataset_id if dataset_id is not None else f"dataset-{uuid4()}",
        "purpose": purpose,
        "source": source,
        "metadata": metadata,
    }
    request = build_request(RegisterDatasetRequest, None, fields)
    return Call("POST", "/v1beta/datasets", parse_as(Dataset), body=_json(request))


def list_datasets() -> Call[list[Dataset]]:
    parse = parse_as(ListDatasetsResponse)
    return Call("GET", "/v1beta/datasets", lambda body: parse(body).data)


def get_dataset(dataset_id: str) -> Call[Dataset]:
    return Call("GET", f"/v1beta/datasets/{path_id(dataset_id, param='dataset_id')}", parse_as(Dataset))


def unregister_dataset(dataset_id: str) -> Call[None]:
    return Call("DELETE", f"/v1beta/datasets/{path_id(dataset_id, param='dataset_id')}", parse_nothing)


def rows(dataset_id: str, start_index: int | None, limit: int | None) -> Call[IterrowsResponse]:
    path = f"/v1beta/datasetio/iterrows/{path_id(dataset_id, param='dataset_id')}"
    return Call("GET", path, parse_as(IterrowsResponse), params={"start_index": start_index, "limit": limit})


def append_rows(dataset_id: str, new_rows: list[Row]) -> Call[None]:
    path = f"/v1beta/datasetio/append-rows/{path_id(dataset_id, param='dataset_id')}"
    request = build_request(AppendRowsRequest, None, {"rows": new_rows})
    return Call("POST", path, parse_nothing, body=_json(request), idempotent=False)


def list_models() -> Call[list[Model]]:
    parse = parse_as(ListModelsResponse)
    return Call("GET", "/v1/models", lambda body: parse(body).data)


def get_model(model_id: str) -> Call[Model]:
    return Call("GET", f"/v1/models/{path_id(model_id, param='model_id')}", parse_as(Model))


def register_model(model_id: str, provider_model_id: str | None, metadata: dict[str, Any] | None) -> Call[Model]:
    fields = {"model_id": model_id, "provider_model_id": provider_model_id, "metadata": metadata}
    request = build_request(RegisterModelRequest, None, fields)
    return Call("POST", "/v1/models", parse_as(Model), body=_json(request), idempotent=False)


def unregister_model(model_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/models/{path_id(model_id, param='model_id')}", parse_nothing)


def chat_completion(body: dict[str, Any]) -> Call[ChatCompletion]:
    return Call("POST", "/v1/chat/completions", parse_as(ChatCompletion), body={**body, "stream": False})


def stream_chat_completion(body: dict[str, Any]) -> Call[ChatCompletionChunk]:
    return Call("POST", "/v1/chat/completions", parse_as(ChatCompletionChunk), body={**body, "stream": True})


def completion(body: dict[str, Any]) -> Call[Completion]:
    return Call("POST", "/v1/completions", parse_as(Completion), body={**body, "stream": False})


def stream_completion(body: dict[str, Any]) -> Call[Completion]:
    return Call("POST", "/v1/completions", parse_as(Completion), body={**body, "stream": True})


def version() -> Call[VersionInfo]:
    return Call("GET", "/v1/version", parse_as(VersionInfo))


def health() -> Call[HealthInfo]:
    return Call("GET", "/v1/health", parse_as(HealthInfo))


def list_providers() -> Call[list[ProviderInfo]]:
    parse = parse_as(ListProvidersResponse)
    return Call("GET", "/v1/providers", lambda body: parse(body).data)


def get_provider(provider_id: str) -> Call[ProviderInfo]:
    return Call("GET", f"/v1/providers/{path_id(provider_id, param='provider_id')}", parse_as(ProviderInfo))
