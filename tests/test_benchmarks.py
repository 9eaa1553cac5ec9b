import json
import os

import pytest
import torch

from coreset_sampler import CoresetSampler
from coreset_sampler.experiments import curves, grouped, mean_of, oracle, rows_of, run_all, spread, with_wrong_labels
from coreset_sampler.picture import seconds_to, time_to_accuracy


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_exactly_the_share_of_labels_is_wrong_and_each_other_class_is_as_likely(share):
    labels = torch.arange(9_000) % 3
    wrong = with_wrong_labels(labels, share, seed=1)
    assert int((wrong != labels).sum()) == int(share * 9_000)
    assert wrong.dtype == labels.dtype
    offsets = torch.bincount((wrong - labels) % 3, minlength=3)[1:].double()
    assert float((offsets - offsets.mean()).abs().max()) < 4 * (offsets.sum().item() / 4) ** 0.5 + 1e-9
    assert torch.equal(wrong, with_wrong_labels(labels, share, seed=1))


def test_labels_of_a_class_that_is_absent_may_be_put():
    wrong = with_wrong_labels(torch.zeros(300, dtype=torch.int64), 0.5, seed=0, classes=4)
    assert wrong.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("share", "classes", "message"), [(30, None, "pass 0.3"), (0.5, 1, "at least 2")])
def test_a_share_or_number_of_classes_that_makes_no_sense_is_refused(share, classes, message):
    with pytest.raises(ValueError, match=message):
        with_wrong_labels(torch.zeros(10, dtype=torch.int64), share, seed=0, classes=classes)


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
    assert rows_of(file) == [{"number": 2, "inverse": 0.5}]


def test_a_line_that_was_cut_off_by_a_kill_is_run_again(tmp_path):
    file = tmp_path / "rows.jsonl"
    run_all([{"number": 2}, {"number": 3}], square, file)
    file.write_text(file.read_text()[:-5])
    rows = run_all([{"number": 2}, {"number": 3}], square, file)
    assert [row["square"] for row in rows] == [4, 9]
    assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [2, 3]


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
