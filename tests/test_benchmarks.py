"""The benchmarks' own arithmetic, and one comparison from end to end at the size of a toy."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from apis.post_training.models import JobEvent, JobEventKind
from benchmarks import training
from benchmarks.cases import CASES, Case, Order, Result, Settings
from benchmarks.checkpoint_cost import epoch_costs, inside_costs, undisturbed
from benchmarks.compare import HELD_OUT_TOLERANCE, STEP_TOLERANCE, agree, ratio
from benchmarks.flops import count, linears
from benchmarks.gemm import products
from benchmarks.report import table, write_section
from benchmarks.workspace import generated_rows
from providers.torchtune.architecture import Architecture
from providers.torchtune.families import describe
from tests.tiny_llama import save_tiny_llama

SMOLLM2 = Architecture(
    family="llama",
    vocab_size=49152,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    embed_dim=576,
    intermediate_dim=1536,
    norm_eps=1e-5,
    rope_base=100_000,
    rope_scaling=None,
    tied=True,
    context_length=8192,
    sliding_window=None,
)


# -- operations ------------------------------------------------------------------------------------------------------


def test_operations_of_smollm2_are_those_counted_by_hand():
    found = count(SMOLLM2, rank=16, lengths=[100], supervised=74)
    # A layer: q and o 576 x 576, k and v 576 x 192, gate, up and down 576 x 1536.
    layer = 2 * 331_776 + 2 * 110_592 + 3 * 884_736
    assert found.body == 4 * 30 * layer * 100 == 4 * 106_168_320 * 100
    assert found.head == 4 * 28_311_552 * 74
    # 16 x (in + out): q, o 1152; k, v 768; gate, up, down 2112.
    assert found.lora == 6 * 4_884_480 * 100
    assert found.attention == 6 * 30 * 576 * 100 * 101
    assert found.per_token == pytest.approx(0.5483e9, rel=1e-3)


def test_operations_are_those_that_pytorch_counts_in_a_forward_pass():
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    layers = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    ours = replace(SMOLLM2, vocab_size=128, embed_dim=64, intermediate_dim=96, **layers)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, 32, dtype=torch.long))
    linear = sum(
        flops for op, flops in counter.get_flop_counts()["Global"].items() if "mm" in str(op) or "linear" in str(op)
    )
    found = count(ours, rank=8, lengths=[32], supervised=32)
    assert linear == (found.body + found.head) / 2


def test_the_products_of_a_step_add_up_to_its_operations():
    lengths, supervised = [64, 64, 64], 3 * 48
    found, wanted = products(SMOLLM2, 16, lengths, supervised), count(SMOLLM2, 16, lengths, supervised)
    total = dict.fromkeys(("head", "LoRA", "attention", "body"), 0.0)
    for product in found:
        is_lora = any(part in product.name for part in ("A ", "B ", "gradient"))
        kind = "head" if "head" in product.name else "LoRA" if is_lora else "body"
        kind = "attention" if "scores" in product.name else kind
        total[kind] += product.times * product.flops
    assert total["head"] == wanted.head
    assert total["body"] == wanted.body
    # Whole squares instead of the causal half.
    assert total["attention"] == wanted.attention * 2 * 64 / 65
    assert total["LoRA"] == pytest.approx(_lora_products(16, sum(lengths)))


def _lora_products(rank: int, tokens: int) -> float:
    parameters = sum(linear.lora_parameters(rank) for linear in linears(SMOLLM2))
    return 6 * SMOLLM2.num_layers * parameters * tokens


# -- comparing -------------------------------------------------------------------------------------------------------


def result(losses: list[float], plan: list[list[int]] | None = None, tokens: int = 100) -> Result:
    n = len(losses)
    ends = [10.0 + step for step in range(n)]
    return Result(losses, ends, plan, [tokens] * n, [tokens // 2] * n, [2 * tokens] * n, 10**9, 3.0)


PLAN = [[0, 1], [2, 3]]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_ratio_is_refused_where_losses_of_the_same_rows_differ_by_more_than_allowed(dtype: str):
    inside, outside = (1 + factor * STEP_TOLERANCE[dtype] for factor in (0.9, 1.1))
    theirs = result([2.0, 1.0], PLAN)
    accepted = agree(result([2.0, inside], PLAN), theirs, dtype)
    assert accepted.refused is None
    assert (accepted.by, accepted.difference) == ("steps", pytest.approx(0.9 * STEP_TOLERANCE[dtype]))
    refused = agree(result([2.0, outside], PLAN), theirs, dtype)
    assert refused.refused is not None
    assert "losses differ" in refused.refused


def test_a_loss_that_is_no_number_is_refused():
    assert agree(result([2.0, math.nan], PLAN), result([2.0, 1.0], PLAN), "bf16").refused is not None


def test_where_rows_differ_the_held_out_loss_after_the_same_tokens_decides():
    ours, theirs = result([2.0, 1.0], PLAN), result([5.0, 9.0], [[3, 2], [1, 0]])
    near, far = 1 + 0.9 * HELD_OUT_TOLERANCE, 1 + 1.1 * HELD_OUT_TOLERANCE
    assert agree(ours, theirs, "fp32", (near, 1.0)).refused is None
    assert agree(ours, theirs, "fp32", (far, 1.0)).refused is not None
    assert agree(ours, theirs, "fp32").refused is not None
    more = result([5.0, 9.0], [[3, 2], [1, 0]], tokens=110)
    assert "220" in str(agree(ours, more, "fp32", (1.0, 1.0)).refused)


def test_an_unknown_order_of_rows_never_counts_as_the_same():
    assert agree(result([2.0, 1.0]), result([2.0, 1.0]), "fp32").by == "held-out rows"


def test_a_ratio_is_the_median_of_the_ratios_of_pairs():
    found = ratio([10.0, 30.0, 20.0], [5.0, 10.0, 20.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 3.0)


def test_rates_leave_out_the_first_steps_and_padding():
    found = result([1.0] * 6, tokens=100)
    assert found.rate(skip=2) == 4 * 100 / 4
    assert found.rate(skip=2, supervised=True) == 50
    assert found.step_seconds(skip=2) == 1.0


def test_an_order_is_read_as_it_was_written(tmp_path: Path):
    case = CASES["trl-padded-autocast"]
    order = Order(tmp_path, tmp_path / "out", case, Settings(rank=7), "bf16", 3, [[1, 2], [3]])
    order.save(tmp_path / "order.json")
    assert Order.load(tmp_path / "order.json") == order
    assert order.steps == 2
    assert replace(order, plan=None).steps == Settings().steps
    assert replace(order, plan=None, case=replace(case, packed=True)).steps == Settings().packed_steps


# -- the report ------------------------------------------------------------------------------------------------------


def test_a_section_replaces_itself_and_nothing_else(tmp_path: Path):
    file = tmp_path / "performance.md"
    file.write_text("# Performance\n\nBy hand.\n")
    write_section(file, "one", "## One\n\nfirst")
    write_section(file, "two", "## Two")
    before = file.read_text()
    write_section(file, "one", "## One\n\nfirst")
    assert file.read_text() == before
    write_section(file, "one", "## One\n\nsecond \\1 {x}")
    assert file.read_text() == before.replace("first", "second \\1 {x}")
    assert before.startswith("# Performance\n\nBy hand.\n")


def test_a_lost_marker_is_reported(tmp_path: Path):
    file = tmp_path / "performance.md"
    file.write_text("<!-- begin one -->\n")
    with pytest.raises(ValueError, match="one of the markers"):
        write_section(file, "one", "text")


def test_a_table_is_markdown():
    assert table(["a", "b"], [["x|y", "1"]]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_generated_rows_are_the_same_each_time_and_of_unequal_length():
    rows = generated_rows(200)
    assert rows == generated_rows(200)
    lengths = sorted(len(row["output"]) for row in rows)
    assert lengths[180] > 3 * lengths[20]


# -- checkpoint cost -------------------------------------------------------------------------------------------------


def events(*told: tuple[float, str]) -> list[JobEvent]:
    """`step`, `written`, `announced` or `saved`, each with its second."""
    kinds = {"step": JobEventKind.step, "announced": JobEventKind.checkpoint}
    messages = {"written": "checkpoint m-sft-j-0 written, verifying", "saved": "saved step 3 in 0.1 s"}
    start = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        JobEvent(
            id=number,
            at=start + timedelta(seconds=at),
            kind=kinds.get(name, JobEventKind.log),
            message=messages.get(name, name),
        )
        for number, (at, name) in enumerate(told)
    ]


def test_a_checkpoint_costs_the_time_by_which_later_steps_come_later():
    told = events(
        *((float(second), "step") for second in range(1, 6)),
        (5.5, "written"),
        (7.5, "step"),  # a second late: the checkpoint was written
        (9.5, "step"),  # another: it was verified meanwhile
        (10.0, "announced"),
        (11.0, "step"),  # half a second of it before the announcement
        (12.0, "step"),
        (12.25, "saved"),
        (13.25, "step"),
        (13.5, "written"),  # the last one, which nothing comes after
        (20.0, "announced"),
    )
    assert undisturbed(told) == 1.0
    (cost,) = epoch_costs(told)
    assert (cost.stalled, cost.lost, cost.verified) == (1.5, 3.0, 5.0)
    (inside,) = inside_costs(told)
    assert inside.lost == 0.25


# -- from end to end -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    file = folder / "tokenizer_config.json"
    settings: dict[str, Any] = json.loads(file.read_text())
    # torchtune reads one, whether or not it is used.
    file.write_text(json.dumps(settings | {"bos_token": "<|im_start|>"}))
    return folder


@pytest.mark.timeout(300)
def test_ours_and_torchtune_s_recipe_train_on_the_same_rows_to_the_same_losses(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert describe(tiny).num_layers == 2
    monkeypatch.setenv("POSTGRAD_TEST_DATA", str(tmp_path))  # generated rows, on any machine
    monkeypatch.setitem(CASES, "ours", Case("ours", "ours", options={"kernels": "plain"}))
    sizes = [
        "--batch",
        "2",
        "--accumulation",
        "2",
        "--steps",
        "4",
        "--packed-steps",
        "3",
        "--skip",
        "1",
        "--rows",
        "150",
        "--longest",
        "1024",
    ]
    names = ["--only", "ours,torchtune-padded", "--dtype", "fp32", "--repeats", "1", "--threads", "1"]
    session = training.main(["--model", str(tiny), *sizes, *names])
    theirs = session.runs.results["torchtune-padded", "fp32"][0]
    ours = session.runs.results["ours on rows of torchtune-padded", "fp32"][0]
    assert session.runs.failed == {}
    assert theirs.plan == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert (ours.plan, ours.tokens, ours.supervised) == (theirs.plan, theirs.tokens, theirs.supervised)
    assert theirs.padded_tokens > ours.padded_tokens == ours.tokens
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert agree(ours, theirs, "fp32").refused is None
    held_out = session.runs.held_out
    assert held_out["ours on rows of torchtune-padded", "fp32"] == pytest.approx(
        held_out["torchtune-padded", "fp32"], rel=1e-5
    )
