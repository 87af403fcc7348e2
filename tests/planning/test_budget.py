"""`plan search` within days and money: which devices, how many, and in which layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.plans import plan
from titanlike.planning.whole_run import DAY

TINY = ["data=synthetic", "model.num_hidden_layers=2", "batch_size=64", "seq_len=1024"]
FIXED = ["pp=1", "tp=1", "fsdp.zero=2", "activation_checkpoint=full", "schedule.microbatches=1"]
SEARCH = ["search", *TINY, *FIXED, "precision=bf16"]


def test_offers_within_the_budget_come_first_and_the_cheapest_before_others(
    capsys, tmp_path: Path
) -> None:
    picture, words = tmp_path / "offers.png", [*SEARCH, "tokens=1e12"]
    both = ["gpus=8", "hardware=b200,h100_sxm", "price=9,2", "--picture", str(picture)]
    code, text, _ = plan(capsys, *words, *both, "--json")
    assert code == 0 and picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(text)
    assert [offer["hardware"] for offer in found] == ["h100_sxm", "b200"], "without a limit all are"
    for offer in found:
        days, price = offer["run"]["days"]["mean"], {"h100_sxm": 2, "b200": 9}[offer["hardware"]]
        assert offer["run"]["cost"]["mean"] == pytest.approx(days * 24 * 8 * price)
        assert "dp=8" in offer["layout"]["command"]
    slow, fast = (offer["run"]["days"]["p90"] for offer in found)
    assert fast < slow
    limit = f"days={(slow + fast) / 2}"
    code, text, _ = plan(capsys, *words, *both, limit, "--json")
    offers = [(offer["hardware"], offer["within"]) for offer in json.loads(text)]
    assert code == 0 and offers == [("b200", True), ("h100_sxm", False)]
    words += ["gpus=8", "hardware=h100_sxm", "price=2", limit, "money=1"]
    code, text, _ = plan(capsys, *words)
    assert code == 1 and text.startswith("0 of 1 offers for 1.0T tokens of llama are within")
    assert max(map(len, text.splitlines()[:-1])) <= 80


def test_as_many_devices_are_tried_as_may_end_in_time(capsys) -> None:
    """From the fewest that would with three fifths of the peak, each number twice the one before."""
    words = [
        *SEARCH,
        "batch_size=1024",
        "tokens=1e16",
        "hardware=h100_sxm",
        "days=20",
        "price=2",
        "--json",
    ]
    _, text, _ = plan(capsys, *words)
    found = {offer["gpus"]: offer for offer in json.loads(text)}
    first, second, third = sorted(found)
    assert (second, third) == (2 * first, 4 * first) and first % 8 == 0
    layout = found[first]["layout"]
    best = 1e16 / (layout["tokens_per_second_per_gpu"] / layout["mfu"] * 0.6 * first) / DAY
    assert best / 2 < 20 <= 2 * best


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tokens=1e12 price=2", "is needed for a search of how many devices; write days=30, or"),
        ("days=soon", "days=soon: must be a number"),
        ("days=30 money=1e6", "of a device and an hour is needed to tell what a run costs"),
        ("gpus=8,many", "gpus=many: must be a number of devices; write gpus=64"),
        ("gpus=8 tokens=1e12 mtbf=2s", "is so short that a run would fail over 10,000 times"),
        (
            "gpus=8 tokens=1e9 hardware.memory=1MiB",
            "no layout fits into the memory of these devices",
        ),
        ("gpus=7 days=3", "no layout of 7 devices is valid"),
        (
            "hardware=h100_sxm,h200 price=1,2,3",
            "price=1,2,3: must be one price, or one for each of",
        ),
    ],
)
def test_mistakes_are_answered_with_values_that_work(capsys, words: str, said: str) -> None:
    code, _, errors = plan(capsys, *SEARCH, "hardware=h100_sxm", *words.split())
    assert code == 2 and said in errors, errors
