"""The benchmark of a pretrained network at toy size."""

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
    assert found == ["uniform", "label_confidence", "oracle"]
    assert [row["clean"] == 1 for row in rows_of(tmp_path / "log.jsonl")] == [False, False, True]
    (file,) = tmp_path.glob("features_*.pt")
    features = torch.load(file, weights_only=True)
    assert [len(part) for pair in features.values() for part in pair] == [300, 300, 100, 100]
    pretrained.features.cache_clear()
    monkeypatch.setattr(pretrained, "load", lambda *_: pytest.fail("computed again"))
    run(pretrained, monkeypatch, "run", *options, "--strategy", "full, watched", "--noise", 0.4, "--validation")
    last = rows_of(tmp_path / "log.jsonl")[-1]
    assert last["on"] == "validation"
    assert 0 <= last["auc_probability"] <= 1  # everything was watched


def test_labels_are_taken_for_those_of_a_similar_class(pretrained):
    clean = torch.arange(10_000) % 10
    labels = pretrained.noisy(clean, 0.4, 0, by_class=True)
    wrong = labels != clean
    assert float(wrong.double().mean()) == pytest.approx(0.4, abs=0.02)
    assert labels[wrong].equal(pretrained.SIMILAR[clean[wrong]])


def test_the_last_stage_is_trained_on_what_the_others_make(pretrained, tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    toy_data.digits_folder(tmp_path / "digits")
    options = ("--data", tmp_path / "digits", "--seeds", 1, "--results", tmp_path / "log.jsonl", "--noise", 0.5)
    run(
        pretrained,
        monkeypatch,
        "run",
        *options,
        "--setting",
        "tuned_symmetric",
        "--strategy",
        "label_confidence",
        "--passes",
        1,
    )
    (row,) = rows_of(tmp_path / "log.jsonl")
    assert 0 <= row["accuracy"] <= 1
    images = torch.randn(2, 3, 64, 64)
    whole = pretrained.network(None).eval()
    before, after = pretrained.cut(whole)
    with torch.no_grad():
        assert torch.allclose(after(before(images)), whole(images), atol=1e-5)
