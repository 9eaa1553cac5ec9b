"""Folders that recipes and benchmarks open, at toy size: digits, pairs of sentences, a tiny random BERT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
NUMBER = r"[01]\.\d{3} ± \d\.\d{3}"


def run(module: Any, monkeypatch: Any, *arguments: Any) -> None:
    """The script with these arguments."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    module.main()


def pictures(n: int) -> tuple[list, list[int]]:
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    return [Image.fromarray(np.uint8(image * 15.9)) for image in digits.images[:n]], digits.target[:n].tolist()


def digits_folder(folder: Path) -> Path:
    """Opened by `datasets.load_dataset`: 300 digits to train on and 100 to test."""
    import datasets

    images, labels = pictures(400)
    for split, part in (("train", slice(300)), ("test", slice(300, 400))):
        rows = datasets.Dataset.from_dict({"image": images[part], "label": labels[part]})
        rows.to_parquet(folder / f"{split}.parquet")
    return folder


def image_folder(folder: Path) -> Path:
    """train/ and val/ with a folder a class."""
    for i, (image, label) in enumerate(zip(*pictures(260), strict=True)):
        path = folder / ("train" if i < 200 else "val") / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    return folder


def sentences(folder: Path) -> Path:
    """Pairs whose label a bag of words could tell."""
    import datasets

    ends = ("is happy", "may be late", "is not there")
    for split, n in (("train", 120), ("test", 30)):
        rows = {
            "premise": [f"person {i % 7} is there" for i in range(n)],
            "hypothesis": [f"person {i % 7} {ends[i % 3]}" for i in range(n)],
            "label": [i % 3 if i % 20 else -1 for i in range(n)],
        }
        datasets.Dataset.from_dict(rows).to_parquet(folder / f"{split}.parquet")
    return folder


def tiny_bert(folder: Path) -> Path:
    """A random encoder with its tokenizer."""
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "person", "is", "there", "happy", "may", "be", "late", "not"]
    words += [str(number) for number in range(7)]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder
