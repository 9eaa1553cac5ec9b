"""The house rules that a machine can check."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "coreset_sampler"

# Each room may import from its own floor and those below it.
FLOORS = [
    {
        "_version",
        "coreset",
        "epoch",
        "ranks",
        "layers",
        "replay",
        "model_state",
        "reentrant",
        "batch",
        "undisturbed",
        "labels",
        "weighted",
        "types",
        "preprocessing",
        "untrusted",
        "arguments",
        "budget",
        "caller",
        "networks",
        "flat",
        "image_data",
        "metrics",
        "corruptions",
    },
    {"posterior", "probe", "facility_location", "_greedy", "_greedy_torch", "coreset_file"},
    {"strategies", "synthetic", "inference"},
    {"sampler", "formats", "picture", "distill"},
    {"testing", "zoo", "commands", "cli"},
]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.parse(path.read_text()).body:  # not the imports inside functions, which are there to come later
        if isinstance(node, ast.ImportFrom) and node.level:
            inside = path.parent != PACKAGE and node.level == 1
            if not inside:
                rooms |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return rooms


def test_dependencies_point_one_way():
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py")]:
        room = path.stem if path.parent == PACKAGE else path.parent.name
        if room != "__init__":
            assert room in floor_of, f"{room} is on no floor"
            for other in imported_rooms(path):
                assert floor_of.get(other, 99) <= floor_of[room], f"{room} imports {other}"


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
