"""SRe2L (Yin et al. 2023): `new{class:03d}/class{class:03d}_id{i:03d}.jpg`; soft labels apart."""

from __future__ import annotations

import re

from .image_folder import class_folders, numbered, published
from .published import Published
from .source import Source

name = "sre2l"
layout = "a folder of new000/class000_id000.jpg ... of SRe2L"

_FOLDER = re.compile(r"new(\d{3,})")
_FILE = re.compile(r"class(\d{3,})_id\d+\.jpe?g", re.IGNORECASE)


def recognise(source: Source) -> bool:
    """True if every sub-folder is called so."""
    folders = class_folders(source)
    return bool(folders) and all(_FOLDER.fullmatch(folder.name) for folder in folders)


def read(source: Source) -> Published:
    """Pixels and the class of the folder."""
    return published(source, numbered(source, _FOLDER, _FILE), method="SRe2L")
