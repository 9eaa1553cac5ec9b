"""The benchmark of a pretrained network at toy size, and the parts of its loop."""

import dataclasses
import importlib
import re
from types import SimpleNamespace

import pytest
import torch
import toy_data
from harness import rows_of
from toy_data import NUMBER

pytest.importorskip("datasets")
pytest.importorskip("sklearn")
pytest.importorskip("timm")
pytestmark = pytest.mark.recipe


@pytest.fixture
def pretrained(monkeypatch):
    module = importlib.import_module("pretrained")
    small = dict(n=200, n_validation=100, n_test=100, img_size=32, hidden=16, batch_size=10, passes=2)
    for name, setting in module.SETTINGS.items():
        monkeypatch.setitem(module.SETTINGS, name, dataclasses.replace(setting, **small))
    return module


def run(module, monkeypatch, *arguments):
    script = SimpleNamespace(
        __file__=module.__file__, main=lambda: module.main(module.STUDY, module.__doc__, module.more_options)
    )
    toy_data.run(script, monkeypatch, *arguments)


def test_pretrained_makes_its_table_from_features_that_it_computes_once(pretrained, tmp_path, monkeypatch, capsys):
    (tmp_path / "digits").mkdir()
    toy_data.digits_folder(tmp_path / "digits")
    options = ("--data", tmp_path / "digits", "--seeds", 1, "--results", tmp_path / "log.jsonl")
    run(pretrained, monkeypatch, "table", *options, "--noise", 0.5)
    found = re.findall(rf"\| 0\.5 \| (\w+) \|.*{NUMBER}", capsys.readouterr().out)
    assert found == ["uniform", "thresholds", "quality", "oracle"]
    assert [row["clean"] == 1 for row in rows_of(tmp_path / "log.jsonl")] == [False, False, False, True]
    (file,) = tmp_path.glob("features_*.pt")
    features = torch.load(file, weights_only=True)
    assert [len(part) for pair in features.values() for part in pair] == [300, 300, 100, 100]
    pretrained.features.cache_clear()
    monkeypatch.setattr(pretrained, "load", lambda *_: pytest.fail("computed again"))
    run(pretrained, monkeypatch, "run", *options, "--strategy", "quality", "--setting", "by_class", "--validation")
    assert rows_of(tmp_path / "log.jsonl")[-1]["on"] == "validation"


def test_labels_are_taken_for_those_of_a_similar_class(pretrained):
    clean = torch.arange(10_000) % 10
    labels = pretrained.noisy(clean, 0.4, 0, by_class=True)
    wrong = labels != clean
    assert float(wrong.double().mean()) == pytest.approx(0.4, abs=0.02)
    assert labels[wrong].equal(pretrained.SIMILAR[clean[wrong]])


def test_everything_is_shown_once_before_anything_twice_and_without_doubt_in_passes(pretrained):
    queue = pretrained.Queue(100, 10, torch.Generator().manual_seed(0))
    for _ in range(3):
        assert torch.cat([queue.next() for _ in range(10)]).sort().values.equal(torch.arange(100))


def test_an_example_is_shown_as_often_as_its_chance_says_and_is_owed_nothing(pretrained):
    queue = pretrained.Queue(100, 10, torch.Generator().manual_seed(0))
    for _ in range(10):
        queue.next()
    queue.chance = torch.where(torch.arange(100) < 50, 1.0, 0.1)
    often = torch.bincount(torch.cat([queue.next() for _ in range(1100)]), minlength=100).double()
    assert float(often[50:].mean() / often[:50].mean()) == pytest.approx(0.1, abs=0.03)
    queue.chance = torch.ones(100)  # those held back come once, as the others do, not more often
    after = torch.bincount(torch.cat([queue.next() for _ in range(20)]), minlength=100)
    assert int(after.max() - after.min()) <= 1


def test_class_thresholds_doubt_a_label_that_another_class_is_more_likely_than(pretrained):
    scores = pretrained.Scores(torch.arange(10).repeat(3)[:21])  # the last is not seen
    mean = torch.eye(10).repeat(2, 1) * 0.9 + 0.01
    mean[11] = mean[0]  # labelled 1, and looks like 0
    scores.observe(torch.arange(20), mean.log(), epoch=0)
    chance = pretrained.thresholds(scores)
    assert int(chance.argmin()) == 11
    assert chance[0] > 0.9
    assert chance[20] == 1
