"""The providers that come with Postgrad, and the names upstream's run.yaml files know them by."""

from __future__ import annotations

from collections.abc import Sequence

from apis.common import Api
from apis.errors import ProviderInvalid
from providers.spec import ProviderSpec

_TORCHTUNE = ProviderSpec(
    api=Api.post_training,
    provider_type="inline::torchtune",
    module="providers.torchtune.provider",
    config_class="providers.torchtune.config.TorchtunePostTrainingConfig",
    api_dependencies=(Api.datasetio,),
    description="LoRA supervised fine-tuning on one device, in a worker process",
    pip_packages=("postgrad[torchtune]",),
    capabilities=("supervised_fine_tune", "preflight", "sft_sessions", "LoRA", "DoRA", "rsLoRA", "QLoRA"),
    model_types=("llama", "mistral", "qwen2", "gemma", "phi3"),
)
_HUGGINGFACE = ProviderSpec(
    api=Api.post_training,
    provider_type="inline::huggingface",
    module="providers.huggingface.provider",
    config_class="providers.huggingface.config.HuggingfacePostTrainingConfig",
    api_dependencies=(Api.datasetio,),
    description="Supervised fine-tuning of any causal language model of transformers, in a worker process",
    pip_packages=("postgrad[huggingface]",),
    capabilities=(
        "supervised_fine_tune",
        "preflight",
        "sft_sessions",
        "LoRA",
        "DoRA",
        "rsLoRA",
        "Full",
        "layers by the model's own names",
    ),
)
_REMOTE_STACK = ProviderSpec(
    api=Api.post_training,
    provider_type="remote::llama-stack",
    module="providers.remote_stack.provider",
    config_class="providers.remote_stack.config.RemoteStackConfig",
    api_dependencies=(Api.datasetio,),
    description="Sends jobs to another server, a Postgrad or a Llama Stack of 0.1.8 to 0.6.1; can what that one can",
    capabilities=("supervised_fine_tune", "preference_optimize", "preflight"),
)
_LOCALFS = ProviderSpec(
    api=Api.datasetio,
    provider_type="inline::localfs",
    module="providers.localfs.provider",
    config_class="providers.localfs.config.LocalFSConfig",
    description="Rows from requests, data: URIs, files under allowed roots and, where allowed, URLs and the hub",
    capabilities=("rows", "data:", "file:", "http(s):", "huggingface:"),
)
_HUB = ProviderSpec(
    api=Api.datasetio,
    provider_type="remote::huggingface",
    module="providers.hub.provider",
    config_class="providers.hub.config.HuggingfaceDatasetsConfig",
    description="Data sets of the Hugging Face hub",
    capabilities=("huggingface:",),
    pip_packages=("postgrad[torchtune]",),
)
_TRANSFORMERS = ProviderSpec(
    api=Api.inference,
    provider_type="inline::transformers",
    module="providers.inference.provider",
    config_class="providers.inference.config.TransformersInferenceConfig",
    description="Chat and text completions from base models and checkpoints, in a worker process",
    pip_packages=("postgrad[torchtune]",),
    capabilities=("chat_completion", "completion", "streaming", "adapters"),
)

BUILT_IN: tuple[ProviderSpec, ...] = (_TORCHTUNE, _HUGGINGFACE, _REMOTE_STACK, _LOCALFS, _HUB, _TRANSFORMERS)

ALIASES: dict[tuple[Api, str], str] = {
    (Api.post_training, "inline::torchtune-cpu"): "inline::torchtune",
    (Api.post_training, "inline::torchtune-gpu"): "inline::torchtune",
    (Api.post_training, "inline::huggingface-cpu"): "inline::huggingface",
    (Api.post_training, "inline::huggingface-gpu"): "inline::huggingface",
    (Api.inference, "inline::meta-reference"): "inline::transformers",
}

# Every type that a Llama Stack from 0.1 to 0.6 had for these APIs: a file that names one is right, and a stack that
# lacks it goes without.
_UPSTREAM: dict[Api, str] = {
    Api.post_training: "inline::torchtune inline::torchtune-cpu inline::torchtune-gpu inline::huggingface "
    "inline::huggingface-cpu inline::huggingface-gpu remote::nvidia",
    Api.datasetio: "inline::localfs remote::huggingface remote::nvidia",
    Api.inference: "inline::meta-reference inline::meta-reference-quantized inline::vllm inline::sentence-transformers "
    "inline::transformers remote::anthropic remote::azure remote::bedrock remote::cerebras "
    "remote::cerebras-openai-compat remote::databricks remote::fireworks remote::fireworks-openai-compat "
    "remote::gemini remote::groq remote::groq-openai-compat remote::hf::endpoint remote::hf::serverless "
    "remote::llama-cpp-server remote::llama-openai-compat remote::nvidia remote::oci remote::ollama remote::openai "
    "remote::passthrough remote::runpod remote::sambanova remote::sambanova-openai-compat remote::sample remote::tgi "
    "remote::together remote::together-openai-compat remote::vertexai remote::vllm remote::watsonx",
}


def is_only_upstream(api: Api, provider_type: str, specs: Sequence[ProviderSpec] = BUILT_IN) -> bool:
    """Whether Llama Stack had `provider_type` for `api` and none of `specs` serves it."""
    wanted = ALIASES.get((api, provider_type), provider_type)
    known = provider_type in _UPSTREAM.get(api, "").split()
    return known and not any(spec.api is api and spec.provider_type == wanted for spec in specs)


def types_of(api: Api, specs: Sequence[ProviderSpec] = BUILT_IN) -> list[str]:
    """The types that serve `api`, sorted."""
    return sorted(spec.provider_type for spec in specs if spec.api is api)


def find_spec(api: Api, provider_type: str, specs: Sequence[ProviderSpec] = BUILT_IN) -> ProviderSpec:
    """The spec that serves `api` under the name `provider_type`, an alias included.

    Raises:
        ProviderInvalid: no provider has that name for that API; the message lists those that do. Or several have it.
    """
    wanted = ALIASES.get((api, provider_type), provider_type)
    found = [spec for spec in specs if spec.api is api and spec.provider_type == wanted]
    if len({spec.module for spec in found}) > 1:
        modules = " and ".join(sorted({spec.module for spec in found}))
        raise ProviderInvalid(
            f"several providers of {api.value} are called {wanted!r}, those of the modules {modules}: uninstall all "
            "but one, or name one by `module:`"
        )
    if found:
        return found[0]
    known = ", ".join(types_of(api, specs))
    raise ProviderInvalid(
        f"no provider of type {provider_type!r} is known for {api.value}; "
        + (f"known: {known}" if known else f"{api.value} is served by the stack itself and takes no provider")
    )
