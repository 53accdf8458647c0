"""The house rules that no linter knows: who may import whom, what must stay in step, what a notebook may hold."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from zeroviz.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES = 10
MAX_MODULE_LINES = 400

# The view half of zeroviz: pictures and widgets. Everything else in zeroviz is arithmetic.
VIEW = {
    "bar_layout", "draw", "draw_formula", "draw_guess", "draw_heatmap", "draw_shard_map", "draw_timeline", "draw_wire",
    "head", "panel", "paper", "plot_area", "state", "state_runs",
}  # fmt: skip
VIEW_PACKAGES = {"IPython", "anywidget", "ipywidgets", "matplotlib", "numpy", "traitlets"}
# The commands that start processes reach over into the live half, and only when they are called.
MAY_IMPORT_CLUSTER = {"zeroviz/cli_run.py"}

FILES_IN_NO_TREE = {"__init__.py", "py.typed"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each absolute import of a file as its dotted name, and whether it is made when the file is imported."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            # `from zeroviz import activations` imports a module of that name.
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", modules("zeroviz"), ids=name)
def test_zeroviz_imports_downwards_only(path: Path) -> None:
    """No torch and no ipyparallel anywhere; beyond the standard library only the view half imports anything."""
    room = path.relative_to(ROOT / "zeroviz").parts[0].removesuffix(".py")
    for dotted, at_top in imports(path):
        package, _, rest = dotted.partition(".")
        if package == "cluster":
            assert name(path) in MAY_IMPORT_CLUSTER or room in VIEW, dotted
            assert not at_top, f"{dotted} must be imported where it is called"
        elif package == "zeroviz":
            # A command draws or opens a notebook only when asked; arithmetic never does.
            assert rest.partition(".")[0] not in VIEW or room in VIEW or not at_top, dotted
        elif package not in sys.stdlib_module_names:
            assert room in VIEW, dotted
            assert package in VIEW_PACKAGES, dotted


@pytest.mark.parametrize("path", [*modules("benchmarks"), *modules("docs")], ids=name)
def test_what_a_script_imports_from_here_is_there(path: Path) -> None:
    """Scripts run when somebody wants their figures; no other test imports them, and mypy does not read them."""
    for dotted, _ in imports(path):
        package, *parts = dotted.split(".")
        if package not in ("zeroviz", "cluster", "tests"):
            continue
        folder = ROOT.joinpath(package, *parts[:-1])
        if (folder / parts[-1]).is_dir() or (folder / f"{parts[-1]}.py").exists():
            continue
        module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        assert parts[-1] in names_in(module), dotted


def names_in(module: Path) -> set[str]:
    """What stands in a module at its top, imports included."""
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        found |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return found


@pytest.mark.parametrize("path", modules("cluster"), ids=name)
def test_cluster_imports_no_pictures(path: Path) -> None:
    for dotted, _ in imports(path):
        package, _, rest = dotted.partition(".")
        assert package not in VIEW_PACKAGES - {"traitlets"}, dotted
        assert package != "zeroviz" or rest.partition(".")[0] not in VIEW, dotted


@pytest.mark.parametrize("path", [*modules("zeroviz"), *modules("cluster")], ids=name)
def test_a_module_is_small_enough_to_read_whole(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES


def requirement(text: str) -> tuple[str, str]:
    """`torch>=2.11` as its name and its bound."""
    match = re.fullmatch(r"([A-Za-z0-9._-]+)\s*(.*)", text)
    assert match
    return match[1].lower().replace("_", "-"), match[2]


def test_environment_yml_is_in_step_with_pyproject() -> None:
    text = (ROOT / "environment.yml").read_text()
    entries = dict(requirement(entry) for entry in re.findall(r"^  - ([a-z].*[^:])$", text, re.MULTILINE))
    channels = text.partition("dependencies:")[0]
    assert "- conda-forge" in channels
    del entries["conda-forge"]
    assert entries.pop("python") == PROJECT["requires-python"]
    assert entries.pop("pip") == ""
    entries["torch"] = entries.pop("pytorch")  # its name on conda-forge
    assert entries == dict(map(requirement, PROJECT["dependencies"]))


def test_constraints_pin_everything_that_is_asked_for() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    pinned = {requirement(line)[0] for line in lines}
    wanted = PROJECT["dependencies"] + [entry for extra in PROJECT["optional-dependencies"].values() for entry in extra]
    assert [entry for entry in wanted if requirement(entry)[0] not in pinned] == []


def test_both_optional_extras_are_installed_for_tests_and_named_where_people_look() -> None:
    """CI runs what `make test` installs; conda has no extras, so its file says how they come."""
    assert set(PROJECT["optional-dependencies"]) == {extra.name for extra in EXTRAS.values()} | {"test"}
    assert "'.[test,deepspeed,megatron]'" in (ROOT / "Makefile").read_text()
    for path in ("README.md", "environment.yml"):
        assert "install -c constraints.txt -e '.[deepspeed,megatron]'" in (ROOT / path).read_text(), path


def test_there_is_an_explorer() -> None:
    assert "explorer.ipynb" in [path.name for path in NOTEBOOKS]


def committed(path: Path) -> str:
    """The file as git would commit it: whoever uses a notebook of the checkout saves outputs into it, and may."""
    command = ["git", "show", f":{path.relative_to(ROOT)}"]
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return path.read_text()
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_are_thin_and_clean(path: Path) -> None:
    """A cell is prose or at most ten lines ending in a picture: no outputs, no functions, no counters."""
    for number, cell in enumerate(json.loads(committed(path))["cells"]):
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        assert cell["outputs"] == [], f"cell {number} has outputs"
        assert cell["execution_count"] is None, f"cell {number} has been run"
        assert len(source.splitlines()) <= MAX_CELL_LINES, f"cell {number} is too long"
        assert not re.search(r"^\s*(async )?(def|class) ", source, re.MULTILINE), f"cell {number} defines something"


def test_every_group_of_tests_is_collected() -> None:
    """A folder that pytest passes over (`dist` is one, by default) would look like a green one."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--quiet", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    collected = {line.partition(":")[0] for line in listed.splitlines() if line.startswith("tests/")}
    assert collected == {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}


def files() -> set[str]:
    """Every file of the repository that deserves a line in the README."""
    found = set()
    for top in ROOT.iterdir():
        if (top.name.startswith(".") and top.name != ".ci") or top.name == "build":
            continue
        for path in [top, *top.rglob("*")]:
            parts = path.relative_to(ROOT).parts
            is_made = any(part.endswith(("__pycache__", ".egg-info", ".ipynb_checkpoints")) for part in parts)
            if path.is_file() and not is_made and path.name not in FILES_IN_NO_TREE:
                found.add("/".join(parts))
    return found


def tree_of_readme() -> set[str]:
    """The paths in the README's tree: a folder ends in `/`, what is in it is indented by two more spaces."""
    block = (ROOT / "README.md").read_text().partition("## The tree")[2].split("```")[1]
    folders: list[str] = []
    paths = set()
    for line in block.splitlines()[1:]:
        if not line.strip():
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        entry = line.split()[0]
        folders = folders[:depth]
        if entry.endswith("/"):
            folders.append(entry)
        else:
            paths.add("".join(folders) + entry)
    return paths


def test_the_tree_in_the_readme_lists_every_file() -> None:
    assert (files() - tree_of_readme(), tree_of_readme() - files()) == (set(), set())


def test_the_repository_speaks_of_the_product_alone() -> None:
    """No path of somebody's machine, no package index, nothing left to do."""
    foreign = re.compile(r"(?<![\w.}/~])/(home|root|Users|work|opt)/|index-url|find-links|\b(TODO|FIXME|XXX)\b")
    found = []
    for path in sorted(files() - {name(Path(__file__))}):
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue  # a picture
        found += [f"{path}: {match[0]}" for match in foreign.finditer(text)]
    assert found == []
