"""Pairs of sentences as features for a head: what a frozen sentence encoder makes of each, and how they differ."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

BATCH = 256


def pair_features(data: str, model: str, split: str, n: int) -> tuple[Tensor, Tensor]:
    """`(n, 4 d)`: u, v, |u - v| and u * v for the embeddings of premise and hypothesis (Conneau et al. 2017), and labels.

    Pairs are the first of a fixed random order; those on which the annotators did not agree are left out.
    """
    from datasets import load_dataset

    rows = load_dataset(data, split=split)
    rows = rows.filter(lambda labels: [label >= 0 for label in labels], input_columns="label", batched=True)
    rows = rows.shuffle(seed=0).select(range(min(n, len(rows))))
    texts = sorted({*rows["premise"], *rows["hypothesis"]}, key=len)
    where = {text: i for i, text in enumerate(texts)}
    embedded = embed_sentences(model, texts)
    u, v = (embedded[[where[text] for text in rows[column]]] for column in ("premise", "hypothesis"))
    scale = u.shape[1] ** 0.5  # entries of about 1
    return torch.cat([u, v, (u - v).abs(), u * v * scale], 1) * scale, torch.tensor(rows["label"][:])


@torch.no_grad()
def embed_sentences(model: str, texts: list[str]) -> Tensor:
    """`(len(texts), d)` of length 1: the mean of the last layer over the tokens. Sorted texts waste no padding."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    parts = []
    for start in range(0, len(texts), BATCH):
        tokens = tokenizer(
            texts[start : start + BATCH], padding=True, truncation=True, max_length=64, return_tensors="pt"
        )
        with torch.autocast("cpu", torch.bfloat16):
            last = encoder(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None].float()
        parts.append(normalize((last.float() * mask).sum(1) / mask.sum(1)))
    return torch.cat(parts)
