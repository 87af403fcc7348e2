"""`plan run`: days, money and goodput of a whole run, before it is paid for; compared with what
others published. `tests/support/campaign.py --goodput 12` kills a real run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from support.cells import slow
from support.plans import plan
from titanlike.planning.whole_run import DAY, GPU_MTBF, RunTerms, RunTimes, simulate_runs

RUN = RunTimes(steps=100_000, step=5.0, stall=20, save=20, start=200, down=300, mtbf=1e4)
TERMS = RunTerms()
TINY = ["data=synthetic", "device=cpu", "model.num_hidden_layers=4", "batch_size=16", "seq_len=64"]


# --- failures and saves ---------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [10, 40, 125, 500])
def test_the_mean_of_simulated_runs_is_the_expected_time_of_dalys_model(interval: int) -> None:
    """With failures also in starts and in saves: M exp(R / M) (exp((t + d) / M) - 1) for each t."""
    runs, mtbf, work = simulate_runs(RUN, interval), RUN.mtbf, interval * 5.0
    failures = 100_000 / interval * math.exp(200 / mtbf) * math.expm1((work + 20) / mtbf)
    assert runs.failures.mean() == pytest.approx(failures, rel=0.01)
    assert runs.total.mean() == pytest.approx(failures * (mtbf + RUN.down), rel=0.005)
    assert runs.seconds["steps"] == pytest.approx(500_000)
    assert min(part.min() for part in runs.seconds.values()) >= 0


@pytest.mark.parametrize("save", [0.5, 20, 600])
def test_no_other_interval_of_checkpoints_makes_a_run_shorter(save: float) -> None:
    run = replace(RUN, stall=save, save=save)
    best = simulate_runs(run, run.best_interval).total.mean()
    for factor in (0.5, 0.7, 1.4, 2):
        other = simulate_runs(run, max(1, round(factor * run.best_interval))).total.mean()
        assert other > best, factor


def test_saves_in_the_background_stall_less_and_lose_more() -> None:
    before, behind = simulate_runs(RUN, 100), simulate_runs(replace(RUN, stall=1.0), 100)
    assert behind.seconds["save"].mean() < 0.1 * before.seconds["save"].mean()
    assert behind.seconds["redone"].mean() > before.seconds["redone"].mean()


def test_an_uncertain_step_widens_what_9_of_10_runs_take() -> None:
    sure, unsure = simulate_runs(RUN, 125).total, simulate_runs(replace(RUN, error=0.05), 125).total
    assert unsure.std() > 2 * sure.std()
    assert unsure.mean() == pytest.approx(sure.mean(), rel=0.02)


# --- what others published, and what was measured here --------------------------------------------


def published(gpus: int, days: float, stall: float, save: float) -> tuple[float, float, float]:
    """Days, goodput and failures of a run with the assumptions that `plan run` prints."""
    run = RunTimes(
        steps=round(0.94 * days * DAY / 5),
        step=5.0,
        stall=stall,
        save=save,
        start=TERMS.start + save,
        down=TERMS.down,
        mtbf=GPU_MTBF / gpus,
    )
    runs = simulate_runs(run, run.best_interval)
    return runs.total.mean() / DAY, runs.goodput.mean(), runs.failures.mean()


def test_published_goodputs_are_planned() -> None:
    """Llama 3 405B on 16,384 H100 (arXiv 2407.21783, 3.3.4): 54 days, 419 unexpected interruptions,
    over 90% effective training time; 4.9 TB at 2 TB/s. ByteRobust (arXiv 2509.16293): 97% in three
    months on 9,600 GPUs; saves beside training, failures of a GPU as often as Llama 3's."""
    days, goodput, failures = published(16_384, 54, stall=2.4, save=2.4)
    assert days == pytest.approx(54, rel=0.03) and failures == pytest.approx(419, rel=0.06)
    assert 0.90 < goodput < 0.95
    _, goodput, _ = published(9_600, 90, stall=0.0, save=4.0)
    assert goodput == pytest.approx(0.97, abs=0.01)


@pytest.mark.slow
def test_the_published_gpu_hours_of_llama3_405b_are_planned(capsys) -> None:
    """30.84 million of H100, all its phases, says its model card; the plan is of one: 8,192 tokens,
    and batches of 16.8 million, the layout and attention that tests/planning/test_published.py has."""
    words = "run model=llama3_405b hardware=h100_sxm precision=bf16 tp=8 pp=16 dp=128 fsdp.zero=1 "
    words += "schedule=interleaved1f1b schedule.stages_per_rank=7 schedule.microbatches=16 "
    words += "hardware.attention_efficiency=0.36 batch_size=2048 seq_len=8192 data=synthetic "
    words += "tokens=15.6e12 --json"
    _, text, _ = plan(capsys, *words.split())
    found = json.loads(text)
    assert found["days"]["mean"] * 24 * 16_384 == pytest.approx(30.84e6, rel=0.12)


# --- the command ----------------------------------------------------------------------------------


def test_a_whole_run_is_planned_in_days_money_and_goodput(capsys) -> None:
    words = ["run", *TINY, "hardware=h100_sxm", "tokens=1e12", "price=2.5", "mtbf=1h"]
    code, text, _ = plan(capsys, *words)
    assert code == 0 and max(map(len, text.splitlines())) <= 80
    for row in ("days", "cost", "goodput", "failures"):
        assert f"\n{row} " in text
    assert "\nmtbf      1:00:00, between failures of the job" in text
    code, text, _ = plan(capsys, *words, "--json")
    found = json.loads(text)
    assert found["steps"] == math.ceil(1e12 / (16 * 64))
    assert found["cost"]["mean"] == pytest.approx(found["days"]["mean"] * 24 * 2.5)
    assert found["days"]["p10"] < found["days"]["p50"] < found["days"]["p90"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert found["goodput"]["mean"] == pytest.approx(found["shares"]["steps"], rel=0.01)
    code, text, _ = plan(capsys, *words, "hardware.memory=1MiB")
    assert code == 1 and "memory    a rank would take" in text


def test_what_a_cluster_takes_is_part_of_the_plan(capsys) -> None:
    def planned(*words: str) -> dict:
        run = ["run", *TINY, "hardware=h100_sxm", "tokens=1e9", "mtbf=1h", "--json", *words]
        code, text, _ = plan(capsys, *run)
        assert code == 0
        return json.loads(text)

    usual, slow = planned(), planned("start=10m", "down=20m", "storage=1e6", "step=1s")
    assert slow["down"] == 1200.0 and slow["step"] == pytest.approx(1, rel=0.02)
    assert slow["start"] > 600 + slow["checkpoint_bytes"] / 1e6
    assert slow["save"] > 100 * usual["save"] and slow["checkpoint_every"] > 1
    assert slow["goodput"]["mean"] < usual["goodput"]["mean"]
    copied = planned("storage=1e6", "checkpoint.mode=async")
    assert copied["stall"] < 0.1 * copied["save"] and copied["save"] == slow["save"]
    halves = planned("validation.every=2", "validation.batches=3")
    assert halves["step"] == pytest.approx(1.5 * usual["step"], rel=0.02)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "mtbf=soon",
            "mtbf=soon: must be a time: seconds, 90m, 11h30m or 11:30:00; write mtbf=90m",
        ),
        ("price=-1", "price=-1.0: must be above 0; write price=2.5"),
        ("price=1,2", "price=1,2: must be a number; write price=null"),
        ("tokens=[", "tokens=[: must be a number; write tokens=null"),
        ("gpus=64", "gpus=64: is for a search"),
    ],
)
def test_mistakes_in_the_terms_are_answered_with_values_that_work(capsys, words, said) -> None:
    code, _, errors = plan(capsys, "run", *TINY, "hardware=h100_sxm", *words.split())
    assert code == 2 and said in errors, errors


@pytest.mark.parametrize(
    "words", ["mtbf=3s start=10m", *slow("mtbf=2m tokens=1e17", "mtbf=90s storage=1e6")]
)
def test_a_run_that_would_fail_too_often_is_answered_with_failures_that_it_survives(
    capsys, words: str
) -> None:
    run = ["run", *TINY, "hardware=h100_sxm", "tokens=1e13", *words.split()]
    code, _, errors = plan(capsys, *run)
    assert code == 2 and "is so short that a run would fail over 10,000 times" in errors, errors
    code, text, _ = plan(capsys, *run, errors.rpartition("write ")[2].strip(), "--json")
    assert code == 0 and json.loads(text)["failures"]["p90"] < 20_000


@pytest.mark.parametrize("data", ["data=tokens", *slow("data.tokenizer=/no/such", "data=chat")])
def test_a_plan_needs_no_data_where_the_model_says_its_vocabulary(capsys, data: str) -> None:
    words = ["model=llama3_1b", "hardware=h200", "--json"]
    code, text, said = plan(capsys, *words, data)
    assert code == 0 and "planned without data, with model.vocab_size=128256: data." in said
    _, expected, _ = plan(capsys, *words, "data=synthetic")
    assert json.loads(text) == json.loads(expected)
    code, _, errors = plan(capsys, "hardware=h200", data)
    assert code == 2 and "data." in errors, "llama_tiny takes its vocabulary from the data"
