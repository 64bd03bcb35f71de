"""Names that mean the same model: Llama Stack's SKU names and Hugging Face hub ids."""

from __future__ import annotations

_GROUPS: tuple[tuple[str, ...], ...] = (
    *(
        (f"meta-llama/Llama-2-{size}{kind}-hf", f"Llama-2-{size}{kind}", f"meta-llama/Llama-2-{size}{kind}")
        for size in ("7b", "13b", "70b")
        for kind in ("", "-chat")
    ),
    *(
        (f"meta-llama/Meta-Llama-3-{size}{kind}", f"Llama-3-{size}{kind}", f"meta-llama/Llama-3-{size}{kind}")
        for size in ("8B", "70B")
        for kind in ("", "-Instruct")
    ),
    *(
        (f"meta-llama/Llama-3.1-{size}{kind}", f"Llama3.1-{size}{kind}", f"meta-llama/Meta-Llama-3.1-{size}{kind}")
        for size in ("8B", "70B", "405B")
        for kind in ("", "-Instruct")
    ),
    *(
        (f"meta-llama/Llama-3.2-{size}{kind}", f"Llama3.2-{size}{kind}")
        for size in ("1B", "3B", "11B-Vision", "90B-Vision")
        for kind in ("", "-Instruct")
    ),
    ("meta-llama/Llama-3.3-70B-Instruct", "Llama3.3-70B-Instruct"),
)
_BY_NAME = {name: group for group in _GROUPS for name in group}


def hub_id(name: str) -> str:
    """The hub id (of weights in Hugging Face format) that a SKU name stands for; any other name as it is."""
    return same_model(name)[0]


def same_model(name: str) -> tuple[str, ...]:
    """All names of the model that `name` names, the hub id first; `name` alone where it has no other."""
    return _BY_NAME.get(name, (name,))
