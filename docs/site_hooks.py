"""What the site needs beyond the pages in docs/: pages from elsewhere in the repository, and formulas without scripts."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {"recipes/README.md": "recipes.md", "CONTRIBUTING.md": "contributing.md"}  # file: page of the site

_LINK = re.compile(r"(\]\()([^)#\s]+)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the pages that live outside docs/."""
    for path, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links, which are right in the repository, to the pages of the site."""
    here = next((path for path, name in ELSEWHERE.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def on_the_site(match: re.Match[str]) -> str:
        if ":" in match[2]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        found = ELSEWHERE.get(target, target.removeprefix("docs/") if target.startswith("docs/") else None)
        if found is None:
            return match[0]
        return match[1] + posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(on_the_site, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Writes formulas as MathML, which browsers draw without a script from elsewhere."""

    def formula(match: re.Match[str]) -> str:
        return convert(html.unescape(match[2]), display="block" if match[1] == "div" else "inline")

    return _FORMULA.sub(formula, content)
