"""The benchmarks' harness: runs that survive a kill, tables, time to accuracy."""

import json
import os

import pytest
import torch
from found import auc
from harness import curves, deviation_of_best, grouped, mean_of, rows_of, run_all, spread, with_other_lengths
from infobatch import InfoBatch
from oracle import oracle
from time_to_accuracy import as_many_epochs, seconds_to, time_to_accuracy

from coreset_sampler import CoresetSampler


def test_the_oracle_draws_every_right_label_alike_and_no_wrong_one():
    labels = torch.arange(100) % 4
    wrong = torch.arange(0, 100, 2)
    model, data = torch.nn.Linear(3, 4), [(torch.zeros(3), int(label)) for label in labels]
    sampler = CoresetSampler(data, model, size=10, strategy=oracle(wrong), progress=False)
    times = torch.zeros(100)
    for epoch in range(400):
        sampler.set_epoch(epoch)
        times[sampler.select().indices] += 1
    assert float(times[wrong].max()) == 0
    assert float((times[1::2] - 80).abs().max()) < 40  # the standard deviation is 8
    with pytest.raises(ValueError, match="at most 50"):
        CoresetSampler(data, model, size=51, strategy=oracle(wrong), progress=False).select()


def test_area_under_the_curve_counts_pairs_and_ties_half():
    suspicion = torch.randint(0, 9, (60,), generator=torch.Generator().manual_seed(0)).double()
    wrong = torch.rand(60, generator=torch.Generator().manual_seed(1)) < 0.3
    pairs = suspicion[wrong][:, None] - suspicion[~wrong][None]
    assert auc(suspicion, wrong) == pytest.approx(float(((pairs > 0) + (pairs == 0) / 2).double().mean()))


def test_infobatch_keeps_the_expected_gradient_and_shows_everything_at_the_end():
    sampler = InfoBatch(1000, epochs=16, seed=3)
    assert sorted(sampler) == list(range(1000))  # nothing is learned yet
    losses = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    sampler.observe(torch.arange(1000), losses)
    total = torch.zeros(1000)
    for epoch in range(400):
        sampler.epochs = 10_000
        sampler.set_epoch(epoch)
        total.index_add_(0, sampler.order, sampler.weights[sampler.order])
    assert float((total / 400 - 1).abs().max()) < 0.25  # five standard errors
    assert 700 < len(sampler) < 800
    sampler.epochs = 16
    sampler.set_epoch(14)
    assert sorted(sampler) == list(range(1000))
    assert float(sampler.weights.max()) == 1


def square(job):
    return {"square": job["number"] ** 2, "process": os.getpid()}


def test_finished_jobs_are_taken_from_the_file_and_twins_run_once(tmp_path):
    file = tmp_path / "results" / "rows.jsonl"
    calls = []

    def work(job):
        calls.append(job["number"])
        return square(job)

    jobs = [{"number": number, "trial": (0.1, 32)} for number in (2, 3, 2)]
    rows = run_all(jobs, work, file)
    assert [row["square"] for row in rows] == [4, 9, 4]
    assert calls == [2, 3]
    more = run_all([*jobs, {"number": 5, "trial": (0.1, 32)}], work, file)
    assert [row["square"] for row in more] == [4, 9, 4, 25]
    assert calls == [2, 3, 5]
    assert len(file.read_text().splitlines()) == 3
    assert run_all([], work, file) == []


def test_a_job_that_fails_loses_nothing_of_those_before(tmp_path):
    def work(job):
        return {"inverse": 1 / job["number"]}

    file = tmp_path / "rows.jsonl"
    with pytest.raises(ZeroDivisionError):
        run_all([{"number": 2}, {"number": 0}], work, file)
    (row,) = rows_of(file)
    assert (row.pop("number"), row.pop("inverse")) == (2, 0.5)
    assert row.keys() == {"date", "commit", "machine"}  # when, on which code and where


def test_a_line_that_was_cut_off_by_a_kill_is_run_again(tmp_path):
    file = tmp_path / "rows.jsonl"
    run_all([{"number": 2}, {"number": 3}], square, file)
    file.write_text(file.read_text()[:-5])
    rows = run_all([{"number": 2}, {"number": 3}], square, file)
    assert [row["square"] for row in rows] == [4, 9]
    assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [2, 3]


@pytest.mark.integration
def test_workers_are_processes_of_their_own(tmp_path):
    rows = run_all([{"number": number} for number in range(4)], square, tmp_path / "rows.jsonl", workers=2)
    assert [row["square"] for row in rows] == [0, 1, 4, 9]
    assert os.getpid() not in {row["process"] for row in rows}


def test_rows_are_grouped_averaged_and_spread():
    rows = [
        {"strategy": name, "passes": passes, "accuracy": accuracy, "cpu": 10 * passes}
        for name in ("full", "stable") for passes in (2, 1) for accuracy in (0.1 * passes, 0.3 * passes)
    ]  # fmt: skip
    assert list(grouped(rows, "strategy", "passes")) == [("full", 2), ("full", 1), ("stable", 2), ("stable", 1)]
    assert mean_of(rows[:2], "accuracy") == pytest.approx(0.4)
    lines = curves(rows, "cpu")
    assert list(lines) == ["full", "stable"]
    assert lines["full"] == [(10, pytest.approx(0.2)), (20, pytest.approx(0.4))]
    assert spread([0.5]) == "0.500 ± 0.000"
    assert spread([0.4, 0.6]) == "0.500 ± 0.141"


@pytest.mark.parametrize(
    ("target", "seconds"),
    [(0.1, 10), (0.5, 10), (0.55, 15), (0.6, 20), (0.65, None)],  # reached at the first point, between two, never
)
def test_when_a_curve_reaches_its_aim(target, seconds):
    assert seconds_to([(20, 0.6), (10, 0.5), (40, 0.58)], target) == pytest.approx(seconds)


def test_the_aim_is_99_percent_of_the_best_run_on_full_data_and_ratios_are_against_it(tmp_path):
    pytest.importorskip("matplotlib")
    lines = time_to_accuracy(
        {
            "full": [(10, 0.5), (50, 1.0), (100, 0.9)],  # it memorises wrong labels in the end
            "stable": [(10, 0.89), (20, 0.99)],
            "uniform": [(10, 0.5), (20, 0.7)],
        },
        tmp_path / "new folder" / "time.png",
    )
    assert lines[0] == "99 % of what full data reaches in 50 s is 0.990:"
    assert lines[2] == "  stable: 20 s, 2.50 times sooner than that run, 2.46 than full data gets there"
    assert lines[3] == "  uniform: not reached, 0.700 at best"
    assert (tmp_path / "new folder" / "time.png").stat().st_size > 10_000


def test_with_a_deviation_the_aim_is_also_the_best_less_that(tmp_path):
    pytest.importorskip("matplotlib")
    lines = time_to_accuracy(
        {"full": [(10, 0.95), (20, 0.97), (40, 0.9701)], "stable": [(10, 0.969), (20, 0.97)]},
        tmp_path / "time.png", deviation=0.0011,
    )  # fmt: skip
    assert lines[0] == "99 % of what full data reaches in 40 s is 0.960:"
    assert lines[3] == "what full data reaches in 40 s, 0.9701, less its standard deviation is 0.9690:"
    assert lines[4] == "  full: 20 s, 2.05 times sooner than that run, 1.00 than full data gets there"
    assert lines[5] == "  stable: 10 s, 4.00 times sooner than that run, 1.95 than full data gets there"


def test_the_deviation_is_that_of_the_best_run_on_full_data():
    rows = [
        {"strategy": name, "passes": passes, "accuracy": accuracy}
        for name, passes, accuracies in (("full", 1, (0.1, 0.5)), ("full", 2, (0.4, 0.6)), ("stable", 2, (0.8, 0.9)))
        for accuracy in accuracies
    ]
    assert deviation_of_best(rows) == pytest.approx(0.1414, abs=1e-4)
    assert deviation_of_best(rows[::2]) is None


def test_runs_are_put_beside_full_data_of_as_many_epochs():
    runs = {
        ("full", 4): (20.0, 0.9),
        ("full", 8): (40.0, 0.92),
        ("stable", 8): (25.0, 0.915),
        ("stable", 9): (26.0, 0.92),
    }
    assert as_many_epochs(runs)[1:] == [
        "  stable, 8 epochs: 0.9150 in 25 s, full data 0.9200 in 40 s, 1.60 times sooner"
    ]
    assert as_many_epochs({("full", 4): (20.0, 0.9)}) == []


def test_runs_of_other_lengths_are_read_from_the_file(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = dict(
        setting="a", on="test", noise=0.0, strategy="full", lr=0.1, batch_size=8, seed=0, passes=2.0, accuracy=0.5
    )
    others = [row | dict(passes=4.0), row | dict(seed=1), row | dict(lr=0.2), row | dict(on="validation")]
    file.write_text("".join(json.dumps(other) + "\n" for other in (row, *others)))
    assert with_other_lengths([row], file) == [row, others[0]]
