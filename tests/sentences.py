"""Small hand-written sentences of three kinds, and a tiny random BERT that reads them."""

from __future__ import annotations

import itertools

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

_WHO = ["my aunt", "the pilot", "a farmer", "our teacher", "the boy", "his dentist", "a nurse", "the clerk"]
_WHAT = {
    0: [
        "loves the old film",
        "praises this warm soup",
        "enjoys the long walk",
        "adores that quiet song",
        "likes it a lot",
    ],
    1: [
        "hates the old film",
        "scolds this cold soup",
        "dreads the long walk",
        "loathes that loud song",
        "wants it gone",
    ],
    2: ["paints the old wall", "carries this cold soup", "measures the long road", "files that thick folder", "sits"],
}


def sentences() -> Dataset:
    """120 of them with columns `text`, `input_ids`, `attention_mask`, `label`; no two are alike."""
    rows = [(f"{who} {what}", label) for label, whats in _WHAT.items() for who, what in itertools.product(_WHO, whats)]
    words = sorted({word for text, _ in rows for word in text.split()})
    ids = [[1, *(words.index(word) + 2 for word in text.split())] for text, _ in rows]
    mask = [[1] * len(row) + [0] * (8 - len(row)) for row in ids]
    padded = [row + [0] * (8 - len(row)) for row in ids]
    texts, labels = zip(*rows, strict=True)
    return Dataset.from_dict({"text": texts, "input_ids": padded, "attention_mask": mask, "label": labels})


def index_of(data: Dataset) -> dict[tuple[int, ...], int]:
    """Which sentence a row of word numbers is."""
    return {tuple(row): index for index, row in enumerate(data["input_ids"])}


def tiny_bert() -> BertForSequenceClassification:
    """Two heads, one layer, dropout as usual."""
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = BertConfig(vocab_size=64, max_position_embeddings=16, num_labels=3, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(config)
