"""Scores of a real run, for the tests of the audit: the digits, a fifth of their labels wrong, through a small network."""

import json

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

from coreset_sampler.selection.testing import inject_label_noise


def train_on_digits(rate=0.2, epochs=12):
    """Labels as given, which of them are wrong, and the mean probabilities and margins over all visits."""
    data = load_digits()
    inputs, true = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    labels = inject_label_noise(true, rate, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        probabilities, margins = torch.zeros(len(labels), 10), torch.zeros(len(labels))
        for _ in range(epochs):
            for rows in torch.randperm(len(labels)).split(128):
                logits = model(inputs[rows])
                nn.functional.cross_entropy(logits, labels[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
                probabilities[rows] += logits.detach().softmax(1) / epochs
                own = logits.detach().gather(1, labels[rows, None])
                others = logits.detach().scatter(1, labels[rows, None], -torch.inf)
                margins[rows] += (own[:, 0] - others.max(1).values) / epochs
    return labels, labels != true, probabilities, margins


def tensors_of(labels, probabilities, margins, *, epochs=12, rate=0.2):
    """The tensors of a file of scores; chances by Bayes' rule with the rate known, which the network has learned too."""
    own, other = probabilities.gather(1, labels[:, None])[:, 0], rate / (probabilities.shape[1] - 1)
    true = ((own - other) / (1 - rate - other)).clamp(1e-3, 1 - 1e-3)
    predicted_probability, predicted = probabilities.max(1)
    return {
        "pred_probs": probabilities,
        "labels": labels,
        "counts": torch.full((len(labels),), epochs, dtype=torch.int32),
        "label_probability": own,
        "margin": margins,
        "predicted_probability": predicted_probability,
        "predicted": predicted,
        "chance_right": (1 - rate) * true / ((1 - rate) * true + other * (1 - true)),
    }


def write(path, tensors, *, classes=10, names=(), rate=0.2, **metadata):
    """A file of scores, as `CoresetSampler.save_scores` writes it."""
    said = {
        "format": "coreset_sampler.scores",
        "version": "1",
        "class_names": json.dumps(list(names)) if names else "",
        "estimated_noise_rate": "" if rate is None else str(rate),
        "classes": str(classes),
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {**said, **metadata})
    return path
