"""RDED (Sun et al. 2024): `{class:05d}/class{class:05d}_id{i:05d}.jpg`."""

from __future__ import annotations

import re

from .image_folder import class_folders, images_in, numbered, published
from .published import Published
from .source import Source

name = "rded"
layout = "a folder of 00000/class00000_id00000.jpg ... of RDED"

_FOLDER = re.compile(r"(\d{5})")
_FILE = re.compile(r"class(\d{5})_id\d+\.jpe?g", re.IGNORECASE)


def recognise(source: Source) -> bool:
    """True if every sub-folder is a number of five digits and the first image is called so."""
    folders = class_folders(source)
    if not folders or not all(_FOLDER.fullmatch(folder.name) for folder in folders):
        return False
    return any(_FILE.fullmatch(path.name) for path in images_in(folders[0]))


def read(source: Source) -> Published:
    """Pixels and the class of the folder."""
    return published(source, numbered(source, _FOLDER, _FILE), method="RDED")
