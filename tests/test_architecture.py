"""The rules of docs/architecture.md that a machine can check: who imports whom, what an import costs, how long code gets."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "coreset_sampler"
FILES = [*PACKAGE.rglob("*.py"), *(ROOT / "integrations").glob("*.py")]

GROUND_FLOOR = {"_version", "distributed", "extras", "layers", "randomness"}
MAY_IMPORT = {
    "selection": set(),
    "synthetic": set(),
    "integrations": {"selection", "synthetic"},
    "cli": {"selection", "synthetic"},
}
"""What each room may import besides itself and the ground floor."""

FRAMEWORKS = "timm transformers lightning ray accelerate torchdata datasets matplotlib torchvision sklearn PIL numba"
OWN_MODULES = 75  # that `import coreset_sampler` loads, six of them for scores; each is under 2 ms

LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 300, 50  # unless listed here with a reason; take out what is not needed any more
LONG_FILES = {
    "coreset_sampler/selection/_greedy.py": "every loop that numba compiles, and the cache they share",
}
LONG_FUNCTIONS = {
    "coreset_sampler/selection/_greedy.py:lazy": "one loop, compiled whole: numba would inline its parts again",
    "coreset_sampler/synthetic/pipeline.py:distill": "half of it is the signature, every setting of a run by name",
}
TORCH_IN_CLI = {"options.py": "the number of threads", "experts.py": "the process group of torchrun"}


def package_of(path):
    """The dotted package a file belongs to."""
    return ".".join(["coreset_sampler", *path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).parent.parts])


def imports(source, package):
    """Every name that a file imports, absolute and dotted, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def rooms(source, package):
    """The parts of this package that a file imports."""
    parts = [name.split(".") for name in imports(source, package)]
    return {part[1] for part in parts if part[0] == "coreset_sampler" and len(part) > 1}


@pytest.mark.parametrize(
    ("source", "package", "found"),
    [
        ("from ..synthetic.file import save", "coreset_sampler.selection", {"synthetic"}),
        ("def f():\n    from ..synthetic import file", "coreset_sampler.selection", {"synthetic"}),
        ("from ...synthetic import file", "coreset_sampler.selection.strategies", {"synthetic"}),
        ("from .pools import deal", "coreset_sampler.selection.strategies", {"selection"}),
        ("from .. import distributed", "coreset_sampler.selection", {"distributed"}),
        ("from . import layers", "coreset_sampler", {"layers"}),
        ("if True:\n    import coreset_sampler.cli.main", "coreset_sampler.selection", {"cli"}),
        ("from coreset_sampler import synthetic", "coreset_sampler.integrations", {"synthetic"}),
        ("import torch\nfrom torch import nn", "coreset_sampler.selection", set()),
    ],
)
def test_imports_are_seen_wherever_they_are(source, package, found):
    assert rooms(source, package) == found


def test_neither_wing_imports_the_other():
    for path in FILES:
        room = (package_of(path).split(".")[1:] or [path.stem])[0]
        found = rooms(path.read_text(), package_of(path)) - {room}
        if room in MAY_IMPORT:
            assert found <= GROUND_FLOOR | MAY_IMPORT[room], path
        elif room != "__init__":
            assert room in GROUND_FLOOR, f"{room} is in no wing"
            assert found <= GROUND_FLOOR, f"{room} is on the ground floor and imports from above"


def test_the_command_line_parses_and_leaves_the_work_to_the_package():
    for path in (PACKAGE / "cli").glob("*.py"):
        outside = {name.split(".")[0] for name in imports(path.read_text(), package_of(path))} - {"coreset_sampler"}
        allowed = {"torch"} if path.name in TORCH_IN_CLI else set()
        assert outside - sys.stdlib_module_names <= allowed, path.name


@pytest.fixture(scope="module")
def loaded():
    """The modules that `import coreset_sampler` loads, and those that it loads beyond its dependencies."""
    code = (
        "import sys, json\n"
        "import torch, torch.utils.data, torch.distributed, torch.func, numpy, safetensors.torch, tqdm.auto\n"
        "before = set(sys.modules)\n"
        "import coreset_sampler\n"
        "print(json.dumps([sorted(sys.modules), sorted(set(sys.modules) - before)]))"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_importing_the_package_takes_no_framework_with_it(loaded):
    assert not set(loaded[0]) & set(FRAMEWORKS.split())


def test_importing_the_package_is_no_slower_than_it_was(loaded):
    tops = [name.split(".")[0] for name in loaded[1]]
    assert {*tops} - sys.stdlib_module_names - {"coreset_sampler", "torch"} == set()
    assert tops.count("torch") <= 5
    assert tops.count("coreset_sampler") <= OWN_MODULES


def test_no_module_has_a_name_that_says_nothing():
    assert not {path.stem for path in FILES} & {"utils", "helpers", "common", "base", "misc"}


def test_no_file_is_long_but_those_listed():
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in FILES}
    assert {name for name, length in lines.items() if length > LINES_OF_A_FILE} <= set(LONG_FILES)


def length(function):
    """Lines of a function without its docstring."""
    first = function.body[0]
    docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.lineno + 1 - docstring


def test_no_function_is_long_but_those_listed():
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and length(node) > LINES_OF_A_FUNCTION:
                found.add(f"{path.relative_to(ROOT).as_posix()}:{node.name}")
    assert found <= set(LONG_FUNCTIONS)


def test_one_place_seeds_torch():
    assert [path.name for path in FILES if re.search(r"fork_rng|torch\.manual_seed\(", path.read_text())] == [
        "randomness.py"
    ]


def test_one_place_walks_the_call_stack():
    assert [path.name for path in FILES if "_getframe" in path.read_text()] == ["caller.py"]


def test_the_walk_of_an_index_has_at_most_ten_hops_through_functions_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = page.split("## The walk of an index")[1].split("\n## ")[0]
    hops = re.findall(r"^\d+\. `(?:\w+\.)?(\w+)` \(`([\w/.]+)`\)", walk, re.MULTILINE)
    assert len(hops) == len(re.findall(r"^\d+\. ", walk, re.MULTILINE)) <= 10
    for function, _ in hops:
        assert any(f"def {function}(" in path.read_text() for path in (PACKAGE / "selection").rglob("*.py")), function
