"""What Llama Stack's clients from 0.1 to 0.6 send, put into the words of the typed spec.

The shapes of their bodies are translated before the routes see them; their flat job routes are routes of their own. All
of it ends in the same Protocols.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Query, Response

from apis.common import Identifier, RequestModel
from apis.errors import InvalidField
from apis.inspect.models import ListProvidersResponse
from apis.inspect.protocol import Inspect
from apis.post_training.models import PostTrainingJobArtifactsResponse, PostTrainingJobStatusResponse
from apis.post_training.protocol import PostTraining
from distributions.dialects.llama_stack_datasets import (
    registration_words,
    translate_dataset_registration,
    translate_provider,
)
from distributions.dialects.words import Words

__all__ = [
    "body_translations",
    "body_words",
    "create_flat_job_router",
    "create_inspect_router",
    "translate_dataset_registration",
    "translate_model_registration",
    "translate_preference_optimize",
    "translate_supervised_fine_tune",
]

Body = dict[str, Any]

_JSON_FIELDS = ("training_config", "algorithm_config")
# `DPOAlignmentConfig` up to 0.2.15.
_OLD_DPO_FIELDS = ("reward_scale", "reward_clip", "epsilon", "gamma")


def translate_supervised_fine_tune(body: Body) -> Body:
    """Accept what the command line client sends.

    `training_config` and `algorithm_config` may be JSON inside a string, an empty text stands for none where an id or a
    folder is expected, as "null" does for `checkpoint_dir`, and an `algorithm_config` without its `type` is told by its
    fields.

    Raises:
        InvalidField: a string that is not JSON.
    """
    changed = _without_validation_set(_decoded_configs(body))
    if changed.get("checkpoint_dir") in ("", "null"):
        changed["checkpoint_dir"] = None
    if changed.get("model") == "":
        changed["model"] = None
    algorithm = changed.get("algorithm_config")
    if isinstance(algorithm, dict) and algorithm.get("type") is None:
        changed["algorithm_config"] = algorithm | {"type": "QAT" if "quantizer_name" in algorithm else "LoRA"}
    return changed


def translate_preference_optimize(body: Body) -> Body:
    """Configs as for `translate_supervised_fine_tune`, and the DPO config of clients up to 0.2.15.

    Its four fields are PPO's and never acted on anything, nor can those clients leave them out: it stands for the
    defaults, sigmoid with a beta of 0.1.

    Raises:
        InvalidField: a string that is not JSON.
    """
    changed = _without_validation_set(_decoded_configs(body))
    algorithm = changed.get("algorithm_config")
    if isinstance(algorithm, dict) and "beta" not in algorithm and not algorithm.keys().isdisjoint(_OLD_DPO_FIELDS):
        changed["algorithm_config"] = {key: value for key, value in algorithm.items() if key not in _OLD_DPO_FIELDS}
    return changed


def translate_model_registration(body: Body) -> Body:
    """`metadata` as a JSON string, which is how the command line of 0.1 sends it. Raises InvalidField."""
    metadata = body.get("metadata")
    return {**body, "metadata": _decoded(metadata, "metadata")} if isinstance(metadata, str) else dict(body)


def _decoded_configs(body: Body) -> Body:
    return {**body, **{name: _decoded(body[name], name) for name in _JSON_FIELDS if isinstance(body.get(name), str)}}


def _without_validation_set(body: Body) -> Body:
    """An empty `validation_dataset_id` names none: scripts fill it in from a variable that may be unset."""
    training = body.get("training_config")
    data = training.get("data_config") if isinstance(training, dict) else None
    if not isinstance(training, dict) or not isinstance(data, dict) or data.get("validation_dataset_id") != "":
        return body
    return {**body, "training_config": training | {"data_config": data | {"validation_dataset_id": None}}}


def _decoded(text: str, field: str) -> Any:
    if text.strip() == "":
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(f"{field} is a string that does not hold JSON: {error}", param=field) from None


def body_translations() -> dict[str, Callable[[Body], Body]]:
    """The translation of each path that needs one."""
    jobs: dict[str, Callable[[Body], Body]] = {
        "supervised-fine-tune": translate_supervised_fine_tune,
        "preflight": translate_supervised_fine_tune,
        "preference-optimize": translate_preference_optimize,
    }
    return {
        **{f"/{v}/post-training/{tail}": jobs[tail] for v in ("v1", "v1alpha", "alpha") for tail in jobs},
        **dict.fromkeys(("/v1/datasets", "/v1beta/datasets", "/alpha/datasets/register"), translate_provider),
        **dict.fromkeys(("/v1/models", "/v1/openai/v1/models", "/alpha/models/register"), translate_model_registration),
    }


def body_words() -> dict[str, Callable[[Body], Words]]:
    """What the fields of a translated body are called in the body as it was sent, by path."""
    return dict.fromkeys(("/v1/datasets", "/v1beta/datasets", "/alpha/datasets/register"), registration_words)


class CancelJobRequest(RequestModel):
    job_uuid: Identifier


def create_flat_job_router(impl: PostTraining) -> APIRouter:
    """Job routes that name the job in the query or the body, as clients up to 0.6 do."""
    router = APIRouter(prefix="/post-training/job", tags=["post_training"], deprecated=True)

    @router.get("/status")
    async def get_job_status_flat(job_uuid: str = Query()) -> PostTrainingJobStatusResponse:
        return await impl.get_job_status(job_uuid)

    @router.get("/artifacts")
    async def get_job_artifacts_flat(job_uuid: str = Query()) -> PostTrainingJobArtifactsResponse:
        return await impl.get_job_artifacts(job_uuid)

    @router.post("/cancel", status_code=204, response_class=Response)
    async def cancel_job_flat(request: CancelJobRequest) -> None:
        await impl.cancel_job(request.job_uuid)

    return router


def create_inspect_router(impl: Inspect) -> APIRouter:
    """The provider list where client 0.1.0 looks for it."""
    router = APIRouter(tags=["inspect"], deprecated=True)

    @router.get("/inspect/providers")
    async def list_providers_inspect() -> ListProvidersResponse:
        return await impl.list_providers()

    return router
