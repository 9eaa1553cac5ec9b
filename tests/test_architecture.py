"""The rules of the house that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "coreset_sampler"
INTEGRATIONS = PACKAGE.parent / "integrations"
GROUND_FLOOR = {"_version", "distributed", "extras", "layers"}
ABOVE = {
    "selection": set(),
    "synthetic": set(),
    "integrations": {"selection", "synthetic"},
    "cli": {"synthetic"},
}
"""What each room may import besides itself and the ground floor."""


def imported(path: Path, package: str) -> set[str]:
    """The rooms that a file imports, also inside functions; `package` is its own, dotted below coreset_sampler."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
            parts = [*base, *(node.module or "").split(".")]
            parts = [part for part in parts if part]
            rooms |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "coreset_sampler":
            rooms |= {".".join([*node.module.split(".")[1:], alias.name]).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Import):
            rooms |= {a.name.split(".")[1] for a in node.names if a.name.startswith("coreset_sampler.")}
    return rooms


def test_neither_wing_imports_the_other():
    files = [(path, ".".join(path.relative_to(PACKAGE).parent.parts)) for path in PACKAGE.rglob("*.py")]
    files += [(path, "integrations") for path in INTEGRATIONS.glob("*.py")]
    for path, package in files:
        room = package.split(".")[0] if package else path.stem
        if room in ABOVE:
            strangers = imported(path, package) - GROUND_FLOOR - ABOVE[room] - {room}
            assert not strangers, f"{path.relative_to(PACKAGE.parent)} imports {strangers}"
        elif room != "__init__":
            assert room in GROUND_FLOOR, f"{room} is in no wing"
            assert imported(path, package) <= GROUND_FLOOR, f"{room} is on the ground floor and imports from above"


def test_importing_the_package_takes_no_framework_with_it():
    heavy = [
        "timm",
        "transformers",
        "lightning",
        "ray",
        "accelerate",
        "datasets",
        "matplotlib",
        "torchvision",
        "sklearn",
        "PIL",
    ]
    code = f"import sys, coreset_sampler; print([m for m in {heavy} if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


def test_no_module_has_a_name_that_says_nothing():
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "helpers", "common", "base", "misc"}


def test_one_place_walks_the_call_stack():
    files = [*PACKAGE.rglob("*.py"), *INTEGRATIONS.glob("*.py")]
    assert [path.name for path in files if "_getframe" in path.read_text()] == ["caller.py"]


def test_the_walk_of_an_index_has_at_most_ten_hops_through_functions_that_exist():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = page.split("## The walk of an index")[1].split("\n## ")[0]
    hops = re.findall(r"^\d+\. `(?:\w+\.)?(\w+)` \(`([\w/.]+)`\)", walk, re.MULTILINE)
    assert len(hops) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 10
    for function, _ in hops:
        assert any(f"def {function}(" in path.read_text() for path in (PACKAGE / "selection").rglob("*.py")), function
