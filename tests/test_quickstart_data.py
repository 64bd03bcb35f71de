"""The quickstart's data: whole, consistent, balanced, and nothing of the evaluation in the training rows."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from itertools import product as pairs
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.model_fixture import QUICKSTART, load_example

INTENTS = {"refund", "replace", "track", "cancel", "help"}
KEYS = ["intent", "product", "order"]


def load(split: str) -> list[list[dict[str, str]]]:
    lines = (QUICKSTART / "data" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(set(row) == {"messages"} for row in rows)
    return [row["messages"] for row in rows]


TRAIN, EVAL = load("train"), load("eval")
BOTH = TRAIN + EVAL


def messages(rows: list[list[dict[str, str]]]) -> list[str]:
    return [row[1]["content"] for row in rows]


def labels(rows: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
    return [json.loads(row[2]["content"]) for row in rows]


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def five_grams(text: str) -> set[tuple[str, ...]]:
    found = words(text)
    return {tuple(found[i : i + 5]) for i in range(len(found) - 4)}


def jaccard(a: set[tuple[str, ...]], b: set[tuple[str, ...]]) -> float:
    return len(a & b) / len(a | b)


@pytest.fixture(scope="module")
def evaluation() -> ModuleType:
    return load_example("evaluate")


def test_there_are_enough_rows_of_system_user_and_assistant():
    assert len(TRAIN) >= 240
    assert len(EVAL) >= 40
    for row in BOTH:
        assert [message["role"] for message in row] == ["system", "user", "assistant"]
        assert all(set(message) == {"role", "content"} for message in row)


def test_every_answer_is_compact_json_with_the_three_keys_and_allowed_values():
    for row, label in zip(BOTH, labels(BOTH), strict=True):
        assert list(label) == KEYS
        assert row[2]["content"] == json.dumps(label, separators=(",", ":"))
        assert label["intent"] in INTENTS
        assert re.fullmatch("[a-z]+", label["product"])
        assert label["order"] is None or re.fullmatch("[0-9]{4}", label["order"])


def test_product_and_order_number_stand_in_the_message():
    for message, label in zip(messages(BOTH), labels(BOTH), strict=True):
        assert label["product"] in words(message)
        numbers = re.findall(r"\b[0-9]{4}\b", message)
        assert numbers == ([] if label["order"] is None else [label["order"]]), message


def test_the_prompt_is_the_same_everywhere_and_names_every_key_value_and_the_format():
    (system,) = {row[0]["content"] for row in BOTH}
    assert "JSON" in system
    assert "one line" in system
    for word in [*(f'"{key}"' for key in KEYS), *INTENTS, "null"]:
        assert word in system


def test_labels_are_balanced():
    for rows in (TRAIN, EVAL):
        found, total = labels(rows), len(rows)
        assert set(Counter(label["intent"] for label in found).values()) == {total // len(INTENTS)}
        assert max(Counter(label["product"] for label in found).values()) <= total / 8
        assert 0.5 <= sum(label["order"] is not None for label in found) / total <= 0.75


def test_every_training_product_comes_once_with_every_intent():
    found = Counter((label["product"], label["intent"]) for label in labels(TRAIN))
    assert set(found.values()) == {1}
    assert len(found) == len({product for product, _ in found}) * len(INTENTS)


def test_some_evaluation_products_are_new():
    seen = {label["product"] for label in labels(TRAIN)}
    assert sum(label["product"] not in seen for label in labels(EVAL)) >= len(EVAL) / 4


def test_the_best_constant_answer_is_right_at_most_once_in_twenty():
    for rows in (TRAIN, EVAL):
        (_, count), *_ = Counter(row[2]["content"] for row in rows).most_common(1)
        assert count / len(rows) <= 0.05


def test_no_message_comes_twice():
    assert len({" ".join(words(message)) for message in messages(BOTH)}) == len(BOTH)


def test_order_numbers_are_never_shared_between_training_and_evaluation():
    orders = [{label["order"] for label in labels(rows) if label["order"]} for rows in (TRAIN, EVAL)]
    assert not orders[0] & orders[1]


def test_no_evaluation_message_is_a_near_duplicate_of_a_training_one():
    train, evaluated = ([five_grams(message) for message in messages(rows)] for rows in (TRAIN, EVAL))
    assert max(jaccard(a, b) for a, b in pairs(evaluated, train)) < 0.5


def test_the_near_duplicate_measure_finds_a_message_with_one_word_changed():
    message = messages(TRAIN)[0]
    changed = message.rsplit(" ", 1)[0] + " elephant"
    assert jaccard(five_grams(message), five_grams(changed)) >= 0.5


def test_messages_are_not_templates_with_a_noun_swapped():
    # With the product and the number blanked out, no two messages of one split may still be near-duplicates.
    for rows in (TRAIN, EVAL):
        blanked = [
            five_grams(re.sub(rf"\b{label['product']}\b|[0-9]+", "x", message.lower()))
            for message, label in zip(messages(rows), labels(rows), strict=True)
        ]
        worst = max(jaccard(a, b) for i, a in enumerate(blanked) for b in blanked[:i])
        assert worst < 0.3


def test_messages_are_short_and_long():
    lengths = sorted(len(message.split()) for message in messages(TRAIN))
    assert 5 <= lengths[0] <= 10
    assert 40 <= lengths[-1] <= 50
    assert lengths[len(lengths) * 9 // 10] >= 2 * lengths[len(lengths) // 10]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"intent":"help","product":"pan","order":"1"}', True),
        ('\n{ "order": "1",\n "product": "pan", "intent": "help" } ', True),
        ('{"intent":"help","product":"pan","order":1}', False),
        ('{"intent":"help","product":"pan","order":null}', False),
        ('{"intent":"help","product":"pan"}', False),
        ('{"intent":"help","product":"pan","order":"1","more":true}', False),
        ('{"intent":"help","product":"Pan","order":"1"}', False),
        ('Here it is: {"intent":"help","product":"pan","order":"1"}', False),
        ('{"intent":"help","product":"pan","ord', False),
        ("", False),
        ("null", False),
    ],
)
def test_exact_match_compares_what_the_json_says(evaluation: ModuleType, text: str, right: bool):
    assert evaluation.exact_match('{"intent":"help","product":"pan","order":"1"}', text) is right


def test_true_is_not_one(evaluation: ModuleType):
    assert not evaluation.exact_match('{"urgent":true}', '{"urgent":1}')


def test_the_stack_serves_while_the_block_lasts_and_no_longer(tmp_path: Path):
    server = load_example("server")
    with server.running_stack(tmp_path / "home", tmp_path / "log") as url:
        assert httpx.get(f"{url}/v1/health", trust_env=False).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/v1/health", trust_env=False)


def test_the_stack_is_stopped_when_the_block_fails(tmp_path: Path):
    server = load_example("server")
    urls = []

    def interrupted() -> None:
        with server.running_stack(tmp_path / "home", tmp_path / "log") as url:
            urls.append(url)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[0]}/v1/health", trust_env=False)


def test_a_second_signal_while_the_stack_is_being_stopped_leaves_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """make hands on the signal that it gets, and its process group may have had it already."""
    server = load_example("server")
    stop, urls = server._stop, []

    def stop_under_another_signal(process: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stop(process)

    def stopped() -> None:
        with server.running_stack(tmp_path / "home", tmp_path / "log") as url:
            urls.append(url)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(server, "_stop", stop_under_another_signal)
    with pytest.raises(SystemExit) as ended:
        stopped()
    assert ended.value.code == 128 + signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{urls[0]}/v1/health", trust_env=False)


def test_a_stack_that_cannot_start_says_why(tmp_path: Path):
    from apis.errors import StackError

    server = load_example("server")
    (tmp_path / "home").write_text("a file where the state folder should be")
    with (
        pytest.raises(StackError, match="did not start"),
        server.running_stack(tmp_path / "home", tmp_path / "log"),
    ):
        pass
