"The project's structure: one source of versions, import order of rooms, sizes, documents, and stored notebooks."

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from importlib.metadata import entry_points, metadata
from pathlib import Path

import nbformat
import pytest
from each import each
from house import BUDGETS, RINGS, compound_lines, measure, places, ring_of, sources
from outputs import (
    DATA_BYTES,
    DIGEST,
    HTML_BYTES,
    PICTURE_BYTES,
    PICTURES,
    PLOTLY,
    TEXT_BYTES,
    VARYING,
    code_digest,
    store_outputs,
)
from readme import readme_text
from sync import run_front_page

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, NOTEBOOKS = ROOT / "leakmel", ROOT / "nbs"

# Arrows go to the left only; what stands in no room (leakmel/__init__.py, __main__.py) is the outer shell and may use all.
ROOMS = ["core", "recordings", "mel", "dataset", "pages", "detector", "extras", "operations", "cli"]
# Inside a room the same holds for its sub-folders; a module that lies in none of them may use all. Extras do not use each other.
FOLDERS = {"detector": ["data", "metrics", "model", "train", "evaluate", "predict"]}
APART = {("review", "similar")}  # the extras that may: the first one uses the second
MODULES = sorted(
    p for p in PACKAGE.rglob("*.py") if p.name not in ("__init__.py", "__main__.py", "_modidx.py")
)


def settings() -> dict[str, str]:
    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(parser["DEFAULT"])


def requirement(text: str) -> tuple[str, str]:
    "Name and version part of a requirement; names compare as pip compares them, extras in any order."
    text = re.sub(r"\[([^]]*)\]", lambda m: "[" + ",".join(sorted(m[1].split(","))) + "]", text.strip())
    name, bounds = re.fullmatch(r"([\w.-]+)(.*)", text).groups()  # type: ignore[union-attr]
    return re.sub(r"[-_.]+", "-", name).lower(), bounds


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def tracked() -> list[Path]:
    "Files under version control; where there is no git, the ones that would be."
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        inner = [
            p for folder in ("leakmel", "nbs", "tests") for p in (ROOT / folder).rglob("*") if p.is_file()
        ]
        inner = [p for p in inner if "__pycache__" not in p.parts and not p.match("out*.ipynb")]
        return [*inner, *(p for p in ROOT.iterdir() if p.is_file())]
    return [p for name in done.stdout.split(b"\0") if name and (p := ROOT / name.decode()).is_file()]


def source_notebooks() -> list[Path]:
    found = sorted(NOTEBOOKS.rglob("*.ipynb"))
    return [
        p
        for p in found
        if not p.match("out*.ipynb") and not any(part[0] in "_." for part in p.relative_to(ROOT).parts)
    ]


@cache
def cells_of(path: Path) -> list[nbformat.NotebookNode]:
    return nbformat.read(path, as_version=4).cells


def source_of(path: Path) -> str:
    return "\n".join(c.source for c in cells_of(path))


def is_run_notebook(path: Path) -> bool:
    return any("parameters" in c.metadata.get("tags", []) for c in cells_of(path))


def is_library_notebook(path: Path) -> bool:
    return any(c.source.startswith("#| default_exp") for c in cells_of(path))


# ---- versions and dependencies -------------------------------------------------------------------------------------

# conda-forge's name where it is another one, and what has no package of its own there
CONDA_NAMES = {
    "torch": "pytorch",
    "soundfile": "pysoundfile",
    "xxhash": "python-xxhash",
    "soxr": "soxr-python",
}
EXTRAS = {"learn", "notebook", "gpu", "search", "cluster", "store", "sets", "onnx", "formats", "all", "dev"}


def conda_lists() -> dict[str, list[str]]:
    "The lists of environment.yml by their names, read without a YAML library."
    lists: dict[str, list[str]] = {}
    for line in (ROOT / "environment.yml").read_text(encoding="utf-8").splitlines():
        if m := re.fullmatch(r"\s*(?:- )?(\w+):", line):
            items = lists.setdefault(m[1], [])
        elif m := re.fullmatch(r"\s+- ([^#]+?)\s*(#.*)?", line):
            items.append(m[1])
    return lists


def test_environment_yml_agrees_with_settings_ini():
    "Conda brings the base and the extras with compiled packages; pip installs leakmel and the rest with the bounds of settings.ini."
    s, lists = settings(), conda_lists()
    assert lists["channels"] == ["conda-forge", "nodefaults"]
    assert lists["pip"] == ["-e .[dev]"]
    packages = dict(map(requirement, lists["dependencies"]))
    assert len(packages) == len(lists["dependencies"])
    parts = ("requirements", *(f"{extra}_requirements" for extra in ("learn", "notebook", "gpu")))
    wanted = dict(requirement(r) for part in parts for r in s[part].split())
    assert packages.pop("python") == ">=" + s["min_python"]
    assert packages.pop("pip") == ""
    assert packages == {CONDA_NAMES.get(name, name): bounds for name, bounds in wanted.items()}
    assert "leakmel[all]" in s["dev_requirements"].split()


def test_package_metadata_equal_settings_ini():
    s, m = settings(), metadata("leakmel")
    assert (m["Name"], m["Version"], m["Requires-Python"]) == (
        s["lib_name"],
        s["version"],
        ">=" + s["min_python"],
    )
    assert (m["Summary"], m["Author"]) == (s["description"], s["author"])
    declared = m.get_all("Requires-Dist") or []
    run = {requirement(r.replace(" ", "")) for r in declared if "extra ==" not in r}

    def same(found: set[tuple[str, str]], text: str) -> bool:
        return {(n, frozenset(b.split(","))) for n, b in found} == {
            (n, frozenset(b.split(","))) for n, b in map(requirement, text.split())
        }

    assert same(run, s["requirements"])
    assert (
        {n.removesuffix("_requirements") for n in s if n.endswith("_requirements")}
        == set(m.get_all("Provides-Extra") or [])
        == EXTRAS
    )
    for extra in EXTRAS:
        found = {
            requirement(r.split(";")[0].replace(" ", ""))
            for r in declared
            if re.search(rf"extra == ['\"]{extra}['\"]", r)
        }
        assert same(found, s[f"{extra}_requirements"])
    (script,) = [e for e in entry_points(group="console_scripts") if e.name == "leakmel"]
    assert f"{script.name}={script.value}" == s["console_scripts"]


def test_version_is_the_same_everywhere():
    import leakmel

    version = settings()["version"]
    assert leakmel.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(
        rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M
    )


def test_documents_exist():
    license_text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert "name: The leakmel authors" in citation
    assert "license: Apache-2.0" in citation


# ---- arrows between rooms ------------------------------------------------------------------------------------------


def type_checking_lines(tree: ast.AST) -> set[int]:
    "Lines inside `if TYPE_CHECKING:`."
    blocks = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.If) and ast.unparse(n.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    ]
    return {
        line
        for block in blocks
        for n in block.body
        for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)
    }


@cache
def imports_of(path: Path, *, for_types: bool = False) -> frozenset[str]:
    "Modules of the package that a module imports at its top or inside functions, on request also for types only."
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    exempt = set() if for_types else type_checking_lines(tree)
    parts = module_name(path).split(".")
    for node in ast.walk(tree):
        if getattr(node, "lineno", 0) in exempt:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*parts[: len(parts) - node.level], *([node.module] if node.module else [])])
                if node.level
                else node.module or ""
            )
            found |= {base, *(f"{base}.{a.name}" for a in node.names)}
    known = {module_name(p): p for p in MODULES}
    return frozenset(name for name in found if name in known)


def room_of(name: str) -> int:
    return ROOMS.index(name.split(".")[1])


def test_rooms_import_only_from_rooms_on_the_left():
    against = [
        f"{name} ({ROOMS[room_of(name)]}) imports {imported}"
        for path in MODULES
        for name in [module_name(path)]
        for imported in sorted(imports_of(path))
        if room_of(imported) > room_of(name)
    ]
    assert not against, "\n".join(against)


def folder_of(name: str) -> tuple[str, int]:
    "Room of a module, and the place of its sub-folder in the room's order; last where it lies in none."
    _, room, *rest = name.split(".")
    order = FOLDERS.get(room, [])
    return room, order.index(rest[0]) if len(rest) == 2 and rest[0] in order else len(order)


def test_imports_inside_a_room_follow_the_order_of_sub_folders():
    against = []
    for path in MODULES:
        room, place = folder_of(module_name(path))
        for imported in sorted(imports_of(path)):
            other, its_place = folder_of(imported)
            if other == room and its_place > place:
                against.append(f"{module_name(path)} imports {imported}")
    assert not against, "\n".join(against)


def test_extras_do_not_use_each_other():
    def extra(name: str) -> str:
        return name.split(".")[2] if name.startswith("leakmel.extras.") else ""

    pairs = {(extra(module_name(p)), extra(x)) for p in MODULES for x in imports_of(p)}
    assert {pair for pair in pairs if all(pair) and pair[0] != pair[1]} == APART


def test_operations_use_only_their_ring_and_those_inside_it():
    "What one ring needs is there without the others: `operations.data` knows no detector, and so on."
    order = ["operations.data", "detector", "operations.detector", "extras", "operations.extras"]
    for k, ring in enumerate(order):
        inside = [p for p in MODULES if module_name(p).startswith(f"leakmel.{ring}")]
        assert inside
        for path in inside:
            outside = {x for x in imports_of(path) for o in order[k + 1 :] if x.startswith(f"leakmel.{o}")}
            assert not outside, f"{module_name(path)} imports {sorted(outside)}"


def test_a_data_set_is_described_read_and_checked_without_the_builder():
    "Inside `dataset`: the file format, its reader and writer, and the check use none of what builds."
    inner = ["schema", "reader", "writer", "loader", "verify"]
    for name in inner:
        found = {x.removeprefix("leakmel.dataset.") for x in imports_of(PACKAGE / "dataset" / f"{name}.py")}
        outside = {p.stem for p in (PACKAGE / "dataset").glob("*.py")} - set(inner)
        assert not found & outside, name


def test_every_sub_folder_is_ordered():
    found = {(p.parents[1].name, p.parent.name) for p in MODULES if p.parents[2] == PACKAGE}
    of_extras = {pair for pair in found if pair[0] == "extras"}
    assert of_extras < found
    assert found - of_extras == {(room, folder) for room, order in FOLDERS.items() for folder in order}


def test_no_circular_imports():
    edges = {module_name(p): imports_of(p) - {module_name(p)} for p in MODULES}
    while leaves := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in leaves:
            del edges[name]
    assert not edges, f"these modules import each other in a circle, or hang on one: {sorted(edges)}"


def test_no_pair_of_modules_imports_each_other_for_types():
    edges = {module_name(p): imports_of(p, for_types=True) for p in MODULES}
    pairs = [(a, b) for a, targets in edges.items() for b in targets if a < b and a in edges[b]]
    assert not pairs


def test_package_init_is_lazy_and_complete():
    "The top of the package imports nothing but the standard library and errors, and each of its names is where it says."
    import leakmel

    on_first_use = {"leakmel.core.errors", "leakmel.core.parameters"}
    assert imports_of(PACKAGE / "__init__.py") <= on_first_use
    for name in leakmel.__all__:
        assert getattr(leakmel, name) is not None


# ---- sizes ---------------------------------------------------------------------------------------------------------


@cache
def found_places() -> dict[str, list[str]]:
    return places()


def test_no_private_base_class_has_one_child():
    "A ladder of classes that are only cut into pieces is one class, or an object that owns another."
    assert found_places().get("private base classes with one child", []) == []


def test_one_statement_per_line():
    texts = [p.read_text(encoding="utf-8") for p in sources()]
    assert len(texts) > len(MODULES)
    assert sum(compound_lines(ast.parse(text)) for text in texts) == 0


def test_every_error_has_a_code():
    assert found_places().get("errors without a code", []) == []


def test_the_registry_holds_the_codes_that_are_used_and_no_others():
    from leakmel.core.error_codes import ERROR_CODES, RECORDING

    paths = [p for p in MODULES if p.name != "error_codes.py"] + sorted(NOTEBOOKS.glob("benchmarks/*.py"))
    nodes = [node for p in paths for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))]
    given = {
        node.value.value
        for node in nodes
        if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant)
    }
    assert {code for code in given if isinstance(code, str)} <= set(ERROR_CODES)
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert set(ERROR_CODES) - set(RECORDING) <= words


def test_only_listed_definitions_are_long():
    found = found_places().get("functions over 60 lines, classes over 300", [])
    assert not found


def test_no_budget_is_exceeded(request):
    "What is measured is at most what the last cut reached; `make house` prints the figures, and the budgets that can be lowered."
    figures = measure() | {"collected tests": request.session.testscollected}
    over = [
        f"{name}: {figures[name]:,} of {most:,}" for name, most in BUDGETS.items() if figures[name] > most
    ]
    assert not over, "\n".join(over)


def test_every_module_lies_in_one_ring():
    found = {ring: [p for p in MODULES if ring_of(p.relative_to(PACKAGE)) == ring] for ring in RINGS}
    assert all(found.values())
    assert {p.name for p in found["command line"]} == {"cli.py"}
    for path, ring in (
        ("extras/review/suggest.py", "ring 3"),
        ("detector/train/fit.py", "ring 2"),
        ("operations/extras.py", "ring 3"),
        ("dataset/x.py", "rings 0 and 1"),
        ("__init__.py", "command line"),
        ("mel/__init__.py", "rings 0 and 1"),
    ):
        assert ring_of(Path(path)) == ring
    assert all((PACKAGE / part).exists() for parts in RINGS.values() for part in parts)


def test_structure_measure_counts_examples(tmp_path):
    (tmp_path / "leakmel" / "extras").mkdir(parents=True)
    (tmp_path / "nbs").mkdir()
    cells = [{"source": ["#| default_exp x"]}, {"source": ["1"], "outputs": ["1"]}]
    (tmp_path / "nbs" / "x.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "leakmel" / "__init__.py").write_text("_PUBLIC = {'f': 'bad'}\n__all__ = ['v', *_PUBLIC]\n")
    (tmp_path / "leakmel" / "extras" / "x.py").write_text(
        "__all__ = ['f', '_g']\nfrom ..bad import f, _g\nfrom numpy import _none\n"
        "from leakmel.bad import _g as h\na, b, c = 1, 2, 3\n"
    )
    (tmp_path / "leakmel" / "bad.py").write_text(
        "class _A:\n    pass\n\n\nclass B(_A):\n    x, y = 1, 2; z = 3\n\n\n"
        "class E(LeakmelError):\n    pass\n\n\ndef f():\n    raise E('no')\n"
        + "def g():\n    return 1\n"
        + "    x = 1\n" * 60
    )
    figures = measure(tmp_path)
    assert figures["modules"] == 2
    assert figures["statements, ring 3"] == 5
    assert figures["statements, command line"] == 2
    assert figures["exported names"] == 2
    assert figures["public names"] == 1
    assert figures["imports of private names"] == 2
    assert figures["packed assignments of more than two"] == 1
    assert figures["stored outputs of library notebooks"] == 1
    assert figures["private base classes with one child"] == 1
    assert figures["packed assignments"] == 2
    assert figures["compound statements on one line"] == 1
    assert figures["errors without a code"] == 1
    assert figures["functions over 60 lines, classes over 300"] == 1


# ---- notebooks as they are stored ----------------------------------------------------------------------------------


def unclean_parts(cell: nbformat.NotebookNode, is_run: bool) -> Iterator[str]:
    "Yield what must not be stored with a code cell."
    if cell.execution_count is not None or any(
        "execution_count" in o and o.execution_count for o in cell.outputs
    ):
        yield "the number of an execution"
    if not set(cell.metadata) <= {"tags"}:
        yield f"metadata {sorted(cell.metadata)}"
    if is_run and cell.outputs:
        yield "an output; run notebooks are stored without outputs"
    limits = {"text/plain": TEXT_BYTES, "text/html": HTML_BYTES, "text/markdown": HTML_BYTES}
    limits |= {"image/svg+xml": HTML_BYTES, PLOTLY: DATA_BYTES} | dict.fromkeys(
        PICTURES, PICTURE_BYTES * 4 // 3 + 4
    )
    for output in cell.outputs:
        stream = {"text/plain": output.text} if output.output_type == "stream" else {}
        for kind, content in (stream or output.data).items():
            if len(str(content)) > limits.get(kind, 0):
                yield f"{len(str(content)):,} characters of {kind}"
            if kind not in PICTURES and re.search(rf"{VARYING}|/tmp/", str(content)):
                yield "an output that is different each time"


def test_notebooks_are_stored_clean():
    unclean = [
        f"{path.relative_to(NOTEBOOKS)}, cell {k}: {part}"
        for path in source_notebooks()
        for k, cell in enumerate(cells_of(path))
        if cell.cell_type == "code"
        for part in unclean_parts(cell, is_run_notebook(path))
    ]
    assert not unclean, "\n".join(unclean)


@pytest.mark.slow
def test_outputs_that_differ_between_two_runs_are_not_stored(tmp_path):
    sources = [
        "#| export\nimport os, tempfile, warnings\nimport plotly.graph_objects as go",
        "print('the same')",
        "os.urandom(8)",
        "warnings.warn('no output')",
        "print(tempfile.mkdtemp() + '/file')",
        "go.Figure(go.Scatter(y=[1, 2]), layout={'title': f'{os.getpid()}'})",
        "#| hide\nprint('hidden')",
        "#| cuda\nprint('not executed')",
    ]
    path = tmp_path / "x.ipynb"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in sources])
    nbformat.write(notebook, path)
    n_stored, n_varying = store_outputs(path)
    stored = nbformat.read(path, as_version=4)
    texts = [[o.get("text", "") for o in cell.outputs] for cell in stored.cells]
    assert texts == [[], ["the same\n"], [], [], ["file\n"], [""], [], []]
    assert (n_stored, n_varying) == (3, 1)
    assert set(stored.cells[5].outputs[0].data) - {"image/png"} == {PLOTLY}
    assert stored.metadata[DIGEST] == code_digest(notebook)
    assert not [part for cell in stored.cells for part in unclean_parts(cell, is_run=False)]


def missing_cells(path: Path) -> Iterator[str]:
    "Yield what a library notebook lacks."
    cells = cells_of(path)
    title, *rest = cells[0].source.splitlines()
    if not title.startswith("# "):
        yield "a title"
    if not any(line.startswith("> ") for line in rest):
        yield "one sentence under the title"
    default = next(c.source for c in cells if c.source.startswith("#| default_exp")).split()[-1]
    if default != ".".join(path.relative_to(NOTEBOOKS).with_suffix("").parts):
        yield "a module of its own name"
    if not (PACKAGE / Path(*default.split("."))).with_suffix(".py").is_file():
        yield "its module"
    n_prose = sum(c.cell_type == "markdown" for c in cells)
    if n_prose < sum(bool(re.match(r"#\| *export", c.source)) for c in cells) / 3:
        yield "more prose: it says why"


def test_library_notebooks_start_with_the_required_cells():
    libraries = [p for p in source_notebooks() if is_library_notebook(p)]
    missing = [f"{p.relative_to(NOTEBOOKS)} lacks {part}" for p in libraries for part in missing_cells(p)]
    assert libraries
    assert not missing, "\n".join(missing)


def test_library_notebooks_are_known_to_the_makefile():
    "`make test` executes the library notebooks of all rooms and of the top, and no notebook that papermill runs."
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    library = re.search(r"^LIBRARY := (.+)$", makefile, re.M).group(1).split()  # type: ignore[union-attr]
    pages = re.search(r"^PAGES   := (.+)$", makefile, re.M).group(1).split()  # type: ignore[union-attr]
    found = {p.relative_to(NOTEBOOKS).parts[0]: is_run_notebook(p) for p in source_notebooks()}
    assert sorted(library) == sorted(name for name, runs in found.items() if not runs and name not in pages)
    assert {p.parent for p in source_notebooks() if is_run_notebook(p)} == {
        NOTEBOOKS,
        NOTEBOOKS / "benchmarks",
    }


def test_skip_pattern_of_nbdev_test():
    listing = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True).stdout
    (pattern,) = re.findall(r"nbdev_test --n_workers \d+ --skip_file_re '([^']+)'", listing)
    skipped = ["out.ipynb", "out2.ipynb", "out-training.ipynb", ".hidden.ipynb", "_draft.ipynb"]
    kept = ["wav.ipynb", "search.ipynb", "layout.ipynb"]
    assert [n for n in skipped if not re.search(pattern, n)] == []
    assert [n for n in kept if re.search(pattern, n)] == []


# ---- documents of the code -----------------------------------------------------------------------------------------


def public_functions(path: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    "Name, node and whether it is a method, of all that an importer may call."
    found: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, bool]] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found.append((node.name, node, False))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += [
                (f"{node.name}.{m.name}", m, True)
                for m in node.body
                if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")
            ]
    return found


def undocumented_parts(path: Path) -> Iterator[str]:
    "Yield public parts of a module that lack a docstring or a type."
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not ast.get_docstring(tree):
        yield "no sentence about the module"
    for n in tree.body:
        if isinstance(n, ast.ClassDef) and not n.name.startswith("_") and not ast.get_docstring(n):
            yield f"class {n.name}: no docstring"
    for name, node, is_method in public_functions(path):
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        is_bound = is_method and not any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        bare = [a.arg for a in args[int(is_bound) :] if a.annotation is None]
        if bare:
            yield f"{name}: no type for {', '.join(bare)}"
        if node.returns is None:
            yield f"{name}: no type of the result"
        if not is_method and not ast.get_docstring(node):
            yield f"{name}: no docstring"


def test_public_functions_are_documented():
    missing = [f"{module_name(p)}: {part}" for p in MODULES for part in undocumented_parts(p)]
    assert not missing, "\n".join(missing)


# ---- texts ---------------------------------------------------------------------------------------------------------

# Joined here, so that this file does not hold what it looks for.
FORBIDDEN = [
    "/" + "work/",
    "/" + "home/",
    "/" + "root/",
    "/" + "Users/",
    "C:" + "\\Users",
    "/tmp/" + "nbsrc",
    "TO" + "DO",
    "FIX" + "ME",
    "X" + "XX",
]


def test_texts_mention_only_the_project():
    bad = []
    for path in tracked():
        if path.suffix in (".png", ".wav", ".h5", ".H5"):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        text = re.sub(r"[\w+/]{200,}", "", text)  # pictures of notebooks in Base64
        bad += [f"{path.relative_to(ROOT)}: {word}" for word in FORBIDDEN if word in text]
    assert not bad, "\n".join(bad)


def test_results_are_not_tracked():
    names = [str(p.relative_to(ROOT)) for p in tracked()]
    assert not [
        n
        for n in names
        if re.search(r"(^|/)out[^/]*\.ipynb$|\.H5$|^_docs/|^\.venv/|^runs/(?!benchmarks/)", n)
    ]


def test_readme_is_the_front_page():
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme_text(NOTEBOOKS / "index.ipynb"), (
        "run `make export`"
    )


@pytest.mark.slow
def test_outputs_of_the_front_page_are_current(tmp_path):
    "Run again, on the figures that are tracked, it is the same notebook."
    for name in (
        "nbs/index.ipynb",
        *(str(p.relative_to(ROOT)) for p in (ROOT / "runs" / "benchmarks").glob("*.json")),
        *(str(p.relative_to(ROOT)) for p in (NOTEBOOKS / "benchmarks").glob("*.py")),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    run_front_page(tmp_path)
    stored, printed = (
        nbformat.read(root / "nbs" / "index.ipynb", as_version=4).cells for root in (ROOT, tmp_path)
    )
    assert [c.get("outputs") for c in printed] == [c.get("outputs") for c in stored], "run `make export`"


def test_readme_text(tmp_path):
    "Prose and code as they are, hidden cells left out, stored text below its code."
    v4 = nbformat.v4
    shown = v4.new_code_cell(
        "1 + 1",
        outputs=[
            v4.new_output("execute_result", {"text/plain": "2"}),
            v4.new_output("stream", text="said\n"),
        ],
    )
    cells = [
        v4.new_markdown_cell("# Title\n\ntext\n"),
        v4.new_code_cell("#| hide\nsecret()"),
        shown,
        v4.new_code_cell("#| eval: false\nbuild()"),
        v4.new_code_cell("#| echo: false\n1", outputs=[v4.new_output("stream", text="only this")]),
    ]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "index.ipynb")
    assert readme_text(tmp_path / "index.ipynb") == (
        "# Title\n\ntext\n\n```python\n1 + 1\n```\n\n```text\n2\n```\n\n```text\nsaid\n```\n\n```python\nbuild()\n```\n\n```text\nonly this\n```\n"
    )


def test_notebooks_are_plain_json():
    "Stored as nbformat writes them, so that differences stay small."
    for path in source_notebooks():
        text = path.read_text(encoding="utf-8")
        assert json.dumps(json.loads(text), indent=1, ensure_ascii=False, sort_keys=True) == text.rstrip(
            "\n"
        ), path.name


# ---- make ----------------------------------------------------------------------------------------------------------


def test_make_lists_its_targets():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for target in ("build", "test", "lab", "docs", "clean", "help"):
        assert f"make {target} " in done.stdout


@each(
    ("script", "message"),
    [
        ("exit 127", "3.11 or newer is needed"),
        (
            'case "$*" in *version_info*) exit 1;; -V) echo Python 3.9.2;; esac',
            "is Python 3.9.2; Python 3.11 or newer is needed",
        ),
        ('case "$*" in *ensurepip*) exit 1;; esac', "apt-get install python3-venv"),
        (None, "was not found"),
    ],
)
def test_make_setup_names_a_missing_python(tmp_path, script, message):
    for name in ("Makefile", "settings.ini", "setup.py", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "python"
    if script:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    done = subprocess.run(["make", "setup", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_passes_arguments_unchanged(tmp_path):
    for name in ("Makefile", "settings.ini", "setup.py", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf \'%s|\' "$DATA" "$OUT" "$SETTINGS"\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / ".installed-notebook").touch()
    settings = "sample_rate=4096 pattern='{label}/$HOME {sensor}~#%' preset=overlap"
    done = subprocess.run(
        ["make", "-s", "build", "DATA=a $(b)", "OUT=c", f"SETTINGS={settings}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"a $(b)|c|{settings}|"), done.stderr
    assert "SETTINGS=" in subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_export_check_detects_a_difference(tmp_path, monkeypatch):
    "The check compares before and after, so it needs no commit; and it changes nothing. Only one export is made: the check gets its result."
    import sync

    before = sync.content(ROOT)
    copy = tmp_path / "copy"
    for name, data in before.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(data)
    with (copy / "leakmel" / "core" / "errors.py").open("a") as f:
        f.write("# by hand\n")
    result = copy / "nbs" / "out.ipynb"
    result.write_text("never read, never cleaned")
    changed = sync.content(copy)
    exported = tmp_path / "exported"
    shutil.copytree(copy, exported)
    sync.export(exported)
    assert (exported / "nbs" / "out.ipynb").read_text() == "never read, never cleaned"
    assert sync.content(exported) == before
    (exported / "nbs" / "out.ipynb").unlink()
    plain = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    subprocess.run([Path(sys.executable).parent / "nbdev_export"], cwd=exported, env=plain, check=True)
    assert sync.content(exported) == before, "what a newcomer types changes nothing"

    def export(root: Path) -> None:
        for name, data in sync.content(exported).items():
            (root / name).write_bytes(data)

    monkeypatch.setattr(sync, "export", export)
    assert sync.check(copy) == ["leakmel/core/errors.py"]
    assert sync.content(copy) == changed
    assert result.read_text() == "never read, never cleaned"
