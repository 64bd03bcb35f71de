"""Keys of OpenTinker's configs that a session has no use for, and where they belong instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

_RL = "belongs to reinforcement learning, and a session fine-tunes on given answers: leave it out"
_CLIENT = "is the client's own affair: leave it out of what is submitted"
_MODEL = "is not needed, for a model brings its own: name the model in `model`"
# What neither a session nor its client has a use for.
USELESS: dict[str, str] = (
    dict.fromkeys(
        (
            *("temperature", "top_p", "top_k", "max_new_tokens", "max_prompt_tokens", "repetition_penalty"),
            *("generation_config", "algorithm", "adv_estimator", "rollout_n", "kl", "reward", "reward_model", "critic"),
            *("interaction", "multi_turn", "agent_num_workers", "enable_agent_loop", "tool_config_path"),
        ),
        _RL,
    )
    | dict.fromkeys(("tokenizer_path", "processor_path"), _MODEL)
    | dict.fromkeys(("enable_tracing", "weave_project"), "is not taken: a session has no agent whose calls to trace")
    | {"num_workers": "is not taken: rows are read by one process, ahead of the steps"}
)
_FOREIGN: dict[str, str] = (
    USELESS
    | dict.fromkeys(
        (
            *("data_path", "val_data_path", "batch_size", "val_batch_size"),
            *("num_epochs", "num_steps", "save_freq", "test_freq", "logger_backends"),
            *("scheduler_url", "scheduler_api_key", "server_url", "wandb_key"),
        ),
        _CLIENT,
    )
    | {"num_gpus": "stands beside `config`, not in it", "job_type": "stands beside `config`, not in it"}
)


def refuse_foreign_keys(title: str, config: Any) -> None:
    """Name every key that OpenTinker has and a session has not, and say where it belongs.

    Raises:
        ValidationError: of `title`, with one fault for each such key.
    """
    if not isinstance(config, Mapping):
        return
    faults = [
        InitErrorDetails(type=PydanticCustomError("foreign_key", _FOREIGN[key]), loc=(key,), input=config[key])  # pyright: ignore[reportArgumentType]
        for key in config
        if key in _FOREIGN
    ]
    if faults:
        raise ValidationError.from_exception_data(title, faults)
