"""The networks that `evaluate` judges a coreset with: those asked for by name, or the one it was made with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from .dataset import SyntheticCoreset
from .image_data import ImageData
from .networks import NETWORKS, NORMS, Network, description, network
from .other_networks import is_other, other_network
from .reporting import Reporter
from .results import Row


@dataclass(frozen=True)
class Judge:
    """A maker of networks, what rows say of it, and whether the coreset was made for its kind."""

    make: Network
    row: Row
    home: bool = False


def judges(
    asked: Sequence[str] | Mapping[str, Network] | None,
    widths: Sequence[int] | None,
    norm: str | None,
    coreset: SyntheticCoreset,
    data: ImageData,
    report: Reporter,
) -> list[Judge]:
    """What was asked for, else what the coreset was made with."""
    if norm is not None and norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    if isinstance(asked, Mapping):
        if widths or norm:
            raise ValueError("widths and norm must be left out where networks are functions that make them")
        for name, make in asked.items():
            if isinstance(make, nn.Module) or not callable(make):
                raise TypeError(
                    f"networks must be functions, each call of which makes a fresh network, got a {type(make).__name__} for "
                    f"{name!r}: pass {{{name!r}: lambda: ...}}"
                )
        return [Judge(make, {"network": name}) for name, make in asked.items()]
    own = _recorded(coreset)
    asked = (asked,) if isinstance(asked, str) else asked
    names = (own["kind"],) if asked is None else asked
    return [_judge(name, widths, norm, own, data, report) for name in names]


def _recorded(coreset: SyntheticCoreset) -> Row:
    """The network that a coreset was made with, by name with its norm (`convnet-batch`), and its widths; else a ConvNet."""
    found = coreset.provenance.get("network")
    found = found if isinstance(found, dict) and found.get("net") in NETWORKS else {}
    net = found.get("net", "convnet")
    words = {getattr(make, "__name__", ""): word for word, make in NORMS.items()}
    word = words.get(str(found.get("norm")))
    usual = word is None or description(net)["norm"] == found["norm"]
    return {"kind": net if usual else f"{net}-{word}", "widths": found.get("widths")}


def _judge(
    name: str, widths: Sequence[int] | None, norm: str | None, own: Row, data: ImageData, report: Reporter
) -> Judge:
    shape = data.channels, data.num_classes, data.image_size
    if is_other(name):
        make, note = other_network(name, *shape)
        report.note(note)
        return Judge(make, {"network": name})
    base = name.partition(":")[0].partition("-")[0]
    if base not in NETWORKS:
        known = f"{', '.join(NETWORKS)}, timm:MODEL, hf:DIR"
        raise ValueError(f"unknown network {name!r}; known: {known}")
    same = own["widths"] if name == own["kind"] else None
    used = description(name, widths or same)["widths"]
    source = "asked for" if widths else "what the coreset was made with" if same else "the network's own"
    report.note(f"{name}: widths {' '.join(map(str, used))}, {source}{'' if norm is None else f'; {norm} norm'}")
    make = network(name, *shape, widths=used)
    row = {"network": name, "widths": used}
    if norm is not None:
        make, row = partial(NETWORKS[base], *shape, widths=tuple(used), norm=NORMS[norm]), row | {"norm": norm}
    usual = description(name)["norm"]
    return Judge(make, row, home=name == own["kind"] and (norm is None or NORMS[norm].__name__ == usual))
