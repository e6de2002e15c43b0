"""Change one thing at a time in a module, and print which changes its tests catch and which survive."""

import argparse
import ast
import copy
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("leakmel", "tests", "nbs", "runs", "pyproject.toml", "settings.ini", "setup.py", "Makefile")
PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    *((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitOr, ast.BitAnd), (ast.And, ast.Or)),
]
OTHER = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}


def changed(node: ast.AST) -> Iterator[ast.AST]:
    "Yield what may stand in the place of a node."
    new: Any = copy.deepcopy(node)
    kind: Any = OTHER.get(type(getattr(new, "op", None) or getattr(new, "ops", [None])[0]))
    match new:
        case ast.Compare() if kind is not None:
            new.ops[0] = kind()
            yield new
        case ast.BinOp() | ast.BoolOp() if kind is not None:
            new.op = kind()
            yield new
        case ast.If() | ast.IfExp() | ast.While():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield new
        case ast.Constant(value=bool()):
            yield ast.Constant(not new.value)
        case ast.Constant(value=int() | float() as number):
            yield ast.Constant(number + 1)
        case ast.Return() if new.value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield ast.Pass()


def mutants(text: str) -> dict[str, str]:
    "All changed texts of a module by what was changed: line, old and new."
    tree, found = ast.parse(text), dict[str, str]()
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns", "decorator_list", "keywords"):
                continue
            slots: Any = value if isinstance(value, list) else vars(parent)
            for key in range(len(value)) if isinstance(value, list) else [name]:
                node = slots[key]
                for new in changed(node) if isinstance(node, ast.AST) else ():
                    slots[key] = new
                    words = [ast.unparse(x).partition("\n")[0] for x in (node, new)]
                    whole = ast.unparse(ast.fix_missing_locations(tree))
                    found[f"{getattr(node, 'lineno', 0)}: {words[0]} -> {words[1]}"] = whole
                    slots[key] = node
    return found


def outcome(folder: Path, tests: list[str], limit_s: float) -> str:
    "Run tests until one fails: its name, the status or `time limit`; nothing where all passed."
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    child = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes)
    try:
        text, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "time limit"
    failed = [line.split(" ")[1] for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else f"status {child.returncode}" if child.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="the module to change: leakmel/…")
    parser.add_argument(
        "--tests", required=True, help="arguments of pytest; files that catch most come first"
    )
    parser.add_argument("--sample", type=int, default=50, help="how many changes to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="a record: try the changes that were caught there")
    parser.add_argument("--out", type=Path, required=True, help="the record, written after each change")
    args = parser.parse_args()
    tests, found = shlex.split(args.tests), mutants((ROOT / args.module).read_text(encoding="utf-8"))
    picked = random.Random(args.seed).sample(sorted(found), min(args.sample, len(found)))
    if args.again:
        picked = [what for what in json.loads(args.again.read_text())["caught"] if what in found]
    record: dict[str, Any] = {"module": args.module, "tests": args.tests, "of": len(found)}
    record |= {"caught": {}, "survived": []}
    with tempfile.TemporaryDirectory() as folder:
        for part in filter(Path.is_dir, (ROOT / name for name in COPIED)):
            shutil.copytree(part, Path(folder, part.name), ignore=shutil.ignore_patterns("__pycache__"))
        for part in filter(Path.is_file, (ROOT / name for name in COPIED)):
            shutil.copy(part, folder)
        began = time.monotonic()
        if failed := outcome(Path(folder), tests, 3600):
            parser.error(f"the tests fail on the unchanged module: {failed}")
        limit_s = 60 + 4 * (time.monotonic() - began)
        for what in picked:
            Path(folder, args.module).write_text(found[what], encoding="utf-8")
            if by := outcome(Path(folder), tests, limit_s):
                record["caught"][what] = by
            else:
                record["survived"].append(what)
            args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["survived"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
