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
    similar = torch.tensor(pretrained.CIFAR10)
    labels = pretrained.noisy(clean, 0.4, 0, similar=similar, num_classes=10)
    wrong = labels != clean
    assert float(wrong.double().mean()) == pytest.approx(0.4, abs=0.02)
    assert labels[wrong].equal(similar[clean[wrong]])


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


def test_a_class_is_taken_for_the_one_with_the_nearest_mean_features(pretrained):
    means = torch.tensor([[1.0, 0.0], [0.9, 0.2], [-1.0, 0.1], [-0.8, -0.3]])
    labels = torch.arange(40) % 4
    assert pretrained.similar_classes(means[labels], labels, 4).tolist() == [1, 0, 3, 2]


def test_pairs_of_sentences_become_features_and_a_table(pretrained, tmp_path, monkeypatch):
    for name, make in (("pairs", toy_data.sentences), ("bert", toy_data.tiny_bert)):
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    options = ("--data", tmp_path / "pairs", "--weights", tmp_path / "bert", "--results", tmp_path / "log.jsonl")
    wanted = ("--setting", "pairs_by_class", "--strategy", "label_confidence", "oracle", "--seeds", 1)
    small = dict(n=80, n_validation=10, n_test=20, batch_size=4)
    changed = dataclasses.replace(pretrained.SETTINGS["pairs_by_class"], **small)
    monkeypatch.setitem(pretrained.SETTINGS, "pairs_by_class", changed)
    run(pretrained, monkeypatch, "table", *options, *wanted, "--noise", 0.3)
    confident, oracle = rows_of(tmp_path / "log.jsonl")
    assert oracle["clean"] == 1 > confident["clean"]
    assert 0 <= confident["auc_margin"] <= 1
    (file,) = tmp_path.glob("features_*.pt")
    (x, labels), _ = torch.load(file, weights_only=True).values()
    assert x.shape == (90, 64)
    u, v, apart, _ = x.split(16, 1)
    assert torch.allclose(apart, (u - v).abs(), atol=1e-5)
    assert set(labels.tolist()) == {0, 1, 2}
