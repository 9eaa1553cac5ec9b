"""The label audit: suspects of a real run as a page, a CSV file and what cleanlab reads; foreign and damaged files."""

import base64
import csv
import io
from html.parser import HTMLParser

import numpy as np
import pytest
import score_run
import torch
from safetensors.torch import save_file

from coreset_sampler.cli import main as cli
from coreset_sampler.selection.audit import CSV_COLUMNS, audit
from coreset_sampler.selection.audit_rows import audit_scores
from coreset_sampler.selection.score_file import VECTORS, read_scores

pytest.importorskip("sklearn")
datasets = pytest.importorskip("datasets")
pictures = pytest.importorskip("PIL.Image")


class Page(HTMLParser):
    """A page that is read back: tags, attributes and texts; fails on tags that do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())

    def images(self):
        sources = [value.split(",", 1) for name, value in self.attributes if name == "src"]
        assert all(start == "data:image/png;base64" for start, _ in sources)
        return [pictures.open(io.BytesIO(base64.b64decode(content))) for _, content in sources]


def run(capsys, *arguments):
    code = cli.main(["audit", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    labels, wrong, probabilities, margins = score_run.train_on_digits()
    path = tmp_path_factory.mktemp("digits") / "scores.safetensors"
    return score_run.write(path, score_run.tensors_of(labels, probabilities, margins)), wrong


def toy(n=12, classes=3, seed=0):
    """Tensors of a file: random predictions."""
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(n, classes, generator=generator).mul(2).softmax(1)
    return score_run.tensors_of(torch.arange(n) % classes, probabilities, torch.randn(n, generator=generator))


def toy_file(tmp_path, tensors=None, **metadata):
    return score_run.write(
        tmp_path / "scores.safetensors", tensors or toy(), **{"classes": 3, "rate": None, **metadata}
    )


def test_the_command_finds_the_wrong_digits_and_shows_them(digits, tmp_path, capsys):
    scores, wrong = digits
    page, table, folder = tmp_path / "suspects.html", tmp_path / "suspects.csv", tmp_path / "for" / "cleanlab"
    code, out, err = run(capsys, scores, "--data", "digits", "-o", page, "--csv", table, "--cleanlab", folder)
    assert code == 0, err
    assert f"wrote {page}\n" in out
    assert f"{int(wrong.sum())} of 1,797 labels in the scores file are not those of the data set" in err

    rows = list(csv.DictReader(table.open()))
    assert tuple(rows[0]) == CSV_COLUMNS
    indices = [int(row["index"]) for row in rows]
    assert len(set(indices)) == 100
    assert wrong[indices].float().mean() > 0.95

    read = Page(page.read_text(encoding="utf-8"))
    assert "script" not in read.tags
    assert "link" not in read.tags
    from sklearn.datasets import load_digits

    data, images = load_digits(), read.images()
    assert len(images) == 100
    for index, image in zip(indices, images, strict=True):
        expected = data.images[index] / data.images[index].max()
        assert np.abs(np.asarray(image) / 255 - expected).max() < 0.01
    assert "20.0 %" in read.texts
    assert [text for text in read.texts if text.startswith("row ")] == [f"row {i}, seen 12 times" for i in indices]

    probabilities, labels, kept = (np.load(folder / f"{name}.npy") for name in ("pred_probs", "labels", "indices"))
    stored = read_scores(scores)
    assert probabilities.shape == (1797, 10)
    assert np.allclose(probabilities, stored.pred_probs.numpy(), atol=1e-6)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-6)
    assert (labels == stored.labels.numpy()).all()
    assert (kept == np.arange(1797)).all()
    assert (probabilities[wrong].argmax(1) != labels[wrong]).mean() > 0.8  # as cleanlab would count them


def test_suspects_are_in_order_and_classes_are_counted_as_by_hand(digits):
    scores = read_scores(digits[0])
    found = audit_scores(scores, top=2000)
    chances = scores.chance_right.tolist()
    margins = scores.margin.tolist()
    order = sorted(range(len(scores)), key=lambda i: (chances[i], margins[i], i))
    assert [row.index for row in found.suspects] == order
    assert all(row.probability_wrong == pytest.approx(1 - chances[row.index]) for row in found.suspects)
    for row in found.per_class:
        members = [i for i in range(len(scores)) if str(int(scores.labels[i])) == row.name]
        wrong = [i for i in members if 1 - chances[i] > 0.5]
        assert (row.examples, row.seen, row.probably_wrong) == (len(members), len(members), len(wrong))
        others = [int(scores.predicted[i]) for i in wrong if scores.predicted[i] != scores.labels[i]]
        assert row.confused == max(others.count(c) for c in range(10)) == others.count(int(row.confused_with))
    shares = [row.probably_wrong / row.seen for row in found.per_class]
    assert shares == sorted(shares, reverse=True)


def test_without_an_estimate_no_share_is_told_and_without_data_the_page_has_indices(tmp_path, capsys):
    path, page = toy_file(tmp_path, names=["x", "y", "z"]), tmp_path / "page.html"
    code, out, err = run(capsys, path, "-o", page, "--top", 5)
    assert (code, out.splitlines()[-1]) == (0, "5 suspects of 12 examples seen")
    assert "The run found no share of wrong labels." in err
    read = Page(page.read_text(encoding="utf-8"))
    assert not read.images()
    assert "none found" in read.texts
    found = [audit_scores(read_scores(toy_file(tmp_path, rate=rate))) for rate in (1e-7, 0.3)]
    assert [(each.noise_rate, len(each.notes)) for each in found] == [(None, 1), (0.3, 0)]
    assert read.tags.count("tr") == 1 + 3 + 1 + 5


def test_what_was_never_seen_is_no_suspect_and_is_left_out_for_cleanlab(tmp_path):
    tensors = toy()
    tensors["counts"][[2, 5]] = 0
    tensors["predicted"][[2, 5]] = -1
    for name in ("label_probability", "margin", "predicted_probability", "chance_right", "pred_probs"):
        tensors[name][[2, 5]] = torch.nan
    found = audit(toy_file(tmp_path, tensors, rate=0.1), csv=tmp_path / "a.csv", cleanlab=tmp_path)
    assert sorted(row.index for row in found.suspects) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]
    assert found.notes == ("2 of 12 examples were never seen in training. Nothing is said of them.",)
    assert sum(row.seen for row in found.per_class) == 10
    assert np.isfinite(np.load(tmp_path / "pred_probs.npy")).all()
    assert np.load(tmp_path / "indices.npy").tolist() == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11]


def test_many_classes_are_folded_and_probabilities_that_were_not_kept_are_not_exported(tmp_path, capsys):
    tensors = toy(n=600, classes=200)
    del tensors["pred_probs"]
    path, page = toy_file(tmp_path, tensors, classes=200), tmp_path / "page.html"
    assert run(capsys, path, "-o", page)[0] == 0
    assert Page(page.read_text(encoding="utf-8")).tags.count("details") == 1
    code, _, err = run(capsys, path, "--cleanlab", tmp_path / "out", "--csv", tmp_path / "a.csv")
    assert code == 1
    assert "--cleanlab needs the probabilities of all classes" in err
    assert not (tmp_path / "a.csv").exists()
    assert not (tmp_path / "out").exists()


HOSTILE = "<script>alert(1)</script> & \"quotes\" </style> 'x'"


def test_texts_are_shown_together_and_are_escaped(tmp_path, capsys):
    features = {"premise": datasets.Value("string"), "hypothesis": datasets.Value("string")}
    features["label"] = datasets.ClassLabel(names=[HOSTILE, "neutral", "contradiction"])
    columns = {"premise": [f"{HOSTILE} {i}" for i in range(12)], "hypothesis": ["y" * 3000, None, *("z",) * 10]}
    rows = datasets.Dataset.from_dict({**columns, "label": [i % 3 for i in range(12)]}, datasets.Features(features))
    rows.save_to_disk(tmp_path / "part")
    (tmp_path / "parquet").mkdir()
    rows.to_parquet(tmp_path / "parquet" / "train.parquet")
    path, pages = toy_file(tmp_path), []
    for folder in ("part", "parquet"):
        code, _, err = run(capsys, path, "--data", tmp_path / folder, "-o", tmp_path / f"{folder}.html")
        assert (code, "labels in the scores file" in err) == (0, False)
        pages.append((tmp_path / f"{folder}.html").read_text(encoding="utf-8").replace("in parquet", "in part"))
    assert pages[0] == pages[1]
    read = Page(pages[0])
    assert "script" not in read.tags
    assert {f"{HOSTILE} {i}" for i in range(12)} <= set(read.texts)
    assert read.texts.count("premise") == read.texts.count("hypothesis") == 12
    assert "y" * 2000 + " …" in read.texts
    assert HOSTILE in read.texts


def test_pictures_of_any_kind_are_shown_small_and_a_broken_one_is_told(tmp_path, capsys):
    noise = np.random.default_rng(0)
    images = [
        pictures.fromarray(noise.integers(0, 255, (400, 200, 3), dtype=np.uint8)),
        pictures.fromarray(noise.integers(0, 255, (20, 20, 4), dtype=np.uint8)),
        pictures.fromarray(noise.integers(0, 60000, (20, 20), dtype=np.uint16)),
        pictures.fromarray(noise.integers(0, 255, (20, 20, 3), dtype=np.uint8)).convert("P"),
        pictures.fromarray(noise.integers(0, 255, (20, 20, 3), dtype=np.uint8)).convert("CMYK"),
    ]
    contents = [png(image) for image in images] + [b"\x89PNG\r\n\x1a\n broken"]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [{"bytes": c, "path": None} for c in contents], "label": [0, 1, 2, 0, 1, 2]}
    datasets.Dataset.from_dict(rows, features).save_to_disk(tmp_path / "data")
    path, page = toy_file(tmp_path, toy(n=6)), tmp_path / "page.html"
    assert run(capsys, path, "--data", tmp_path / "data", "-o", page)[0] == 0
    read = Page(page.read_text(encoding="utf-8"))
    shown = {image.size for image in read.images()}
    assert (len(read.images()), shown) == (5, {(80, 160), (20, 20)})
    assert sum(text.startswith("cannot be read: ") for text in read.texts) == 1
    assert read.attributes.count(("class", "sharp")) == 4


def png(image):
    content = io.BytesIO()
    image.save(content, "TIFF" if image.mode == "CMYK" else "PNG")
    return content.getvalue()


def test_rows_that_do_not_match_are_an_error_or_told(tmp_path, capsys):
    path, page = toy_file(tmp_path), tmp_path / "page.html"
    columns = {"text": ["a"] * 12, "label": [(i + 1) % 3 for i in range(12)]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "turned")
    assert (
        "over half of them: are the rows in the same order?"
        in run(capsys, path, "--data", tmp_path / "turned", "-o", page)[2]
    )
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": ["a"] * 3})).save_to_disk(tmp_path / "short")
    datasets.Dataset.from_dict({"x": [[1.0]] * 12}).save_to_disk(tmp_path / "numbers")
    (tmp_path / "empty").mkdir()
    for rest, message in (
        (("--data", "digits"), "a row for each of the 12 scores, in the same order; digits has 1,797"),
        (("--data", "digits", "--split", "test"), "--split must be left out for digits"),
        (("--data", tmp_path / "short"), "short has 3"),
        (("--data", tmp_path / "short", "--split", "valid"), "--split must be one of ['train']"),
        (("--data", tmp_path / "numbers"), "a column of images or of text to show"),
        (("--data", tmp_path / "empty"), "is a file or empty"),
        (("--top", 0), "top must be at least 1, got 0"),
    ):
        code, _, err = run(capsys, path, "-o", tmp_path / "other.html", *rest)
        assert (code, message in err) == (1, True), err
    assert not (tmp_path / "other.html").exists()


def test_files_that_exist_stay_unless_forced(tmp_path, capsys):
    path, page, table = toy_file(tmp_path), tmp_path / "page.html", tmp_path / "a.csv"
    page.write_text("mine")
    code, _, err = run(capsys, path, "-o", page, "--csv", table)
    assert (code, "exists already; --force overwrites it" in err) == (1, True)
    assert (page.read_text(), table.exists()) == ("mine", False)
    assert run(capsys, path, "-o", page, "--csv", table, "--force")[0] == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "for a table pass --csv" in run(capsys, path, "-o", tmp_path / "new.csv")[2]
    assert "must be two files" in run(capsys, path, "-o", tmp_path / "b", "--csv", tmp_path / "b")[2]
    assert "nothing to write" in run(capsys, path)[2]
    code, _, err = run(capsys, path, "-o", tmp_path / "nowhere" / "page.html")
    assert (code, f"cannot write {tmp_path / 'nowhere' / 'page.html'}: make the folder first" in err) == (1, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "page.html", "scores.safetensors"]


DAMAGE = {
    "labels of no class": ({"labels": torch.full((12,), 3)}, {}, "labels must be 0 to 2 for 3 classes"),
    "a prediction of no class": ({"predicted": torch.full((12,), -2)}, {}, "predicted must be -1 to 2"),
    "a vector too short": ({"counts": torch.ones(11, dtype=torch.int32)}, {}, "counts must be torch.int32 (12,)"),
    "another type": ({"margin": torch.ones(12, dtype=torch.float64)}, {}, "margin must be torch.float32 (12,)"),
    "no probability": ({"chance_right": torch.full((12,), 2.0)}, {}, "chance_right must be in [0, 1] or NaN"),
    "columns": ({"pred_probs": torch.ones(12, 4)}, {}, "pred_probs must be torch.float32 (12, 3)"),
    "nothing seen": ({"counts": torch.zeros(12, dtype=torch.int32)}, {}, "none of the 12 examples was seen"),
    "no examples": ({n: torch.zeros(0, dtype=t) for n, t in VECTORS.items()}, {}, "has scores of no example"),
    "another format": ({}, {"format": "pt"}, "not one of scores: its format is 'pt'"),
    "a newer version": ({}, {"version": "2"}, "is newer than this coreset_sampler"),
    "no version": ({}, {"version": "²"}, "is not a number"),
    "classes in words": ({}, {"classes": "ten"}, "classes must be a number"),
    "no classes": ({}, {"classes": ""}, "for 0 classes"),
    "a rate that is none": ({}, {"estimated_noise_rate": "nan"}, "estimated_noise_rate must be a number"),
    "names that are none": ({}, {"class_names": "[1, 2]"}, "class_names must be a JSON list of names"),
    "deep names": ({}, {"class_names": "[" * 100_000}, "class_names must be a JSON list of names"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_a_clear_error(case, tmp_path, capsys):
    tensors, metadata, message = DAMAGE[case]
    path = toy_file(tmp_path, {**toy(), **tensors}, **metadata)
    code, _, err = run(capsys, path, "-o", tmp_path / "page.html")
    assert (code, message in err) == (1, True), err
    assert not (tmp_path / "page.html").exists()


def test_a_foreign_or_cut_file_is_a_clear_error(tmp_path):
    content = toy_file(tmp_path).read_bytes()
    path = tmp_path / "other.safetensors"
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match="foreign, truncated or damaged"):
            read_scores(path)
    path.write_bytes(b"PK\3\4 something else" * 10)
    with pytest.raises(ValueError, match="foreign, truncated or damaged"):
        read_scores(path)
    save_file({"labels": torch.zeros(3)}, path, {"format": "coreset_sampler.scores", "version": "1"})
    with pytest.raises(ValueError, match="it lacks chance_right, counts"):
        read_scores(path)
    with pytest.raises(ValueError, match="not an ordinary file"):
        read_scores(tmp_path)
    with pytest.raises(FileNotFoundError, match="sampler.save_scores"):
        read_scores(tmp_path / "none")


def test_a_file_of_scores_is_read_as_it_was_written(tmp_path):
    tensors = toy()
    scores = read_scores(toy_file(tmp_path, tensors, names=["a", "é", "c"], rate=0.25))
    for name, tensor in tensors.items():
        assert torch.equal(getattr(scores, name), tensor), name
    assert (scores.class_names, scores.estimated_noise_rate, scores.classes) == (("a", "é", "c"), 0.25, 3)
