"""Change one thing at a time in a module and see which changes its tests catch: mutate.py leakmel/x.py --tests "tests/test_x.py -k quick\""""

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

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("leakmel", "tests", "nbs", "runs", "pyproject.toml", "settings.ini", "setup.py", "Makefile")
OTHER_COMPARISON = {
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn},
    **{ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
}
OTHER_OPERATOR = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
    **{ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And},
}


def changed(node: ast.AST) -> Iterator[ast.AST]:
    "Yield what may stand in the place of a node."
    new = copy.deepcopy(node)
    match new:
        case ast.Compare() if (other := OTHER_COMPARISON.get(type(new.ops[0]))) is not None:
            new.ops[0] = other()
            yield new
        case ast.BinOp() | ast.BoolOp() if (other := OTHER_OPERATOR.get(type(new.op))) is not None:
            new.op = other()
            yield new
        case ast.If() | ast.IfExp() | ast.While():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield new
        case ast.Constant(value=bool()):
            yield ast.Constant(not new.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(new.value + 1)
        case ast.Return() if new.value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Raise():
            yield ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield ast.Pass()
        case ast.AugAssign():
            yield ast.Pass()


def mutants(text: str) -> dict[str, str]:
    "All changed texts of a module by what was changed: line, old and new."
    tree, found = ast.parse(text), dict[str, str]()
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns", "decorator_list", "keywords"):
                continue
            places = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for k, node in places:
                for new in changed(node) if isinstance(node, ast.AST) else ():
                    put(parent, name, k, new)
                    what = f"{ast.unparse(node).splitlines()[0]} -> {ast.unparse(new).splitlines()[0]}"
                    found[f"{getattr(node, 'lineno', 0)}: {what}"] = ast.unparse(
                        ast.fix_missing_locations(tree)
                    )
                    put(parent, name, k, node)
    return found


def put(parent: ast.AST, name: str, k: int | None, node: ast.AST) -> None:
    if k is None:
        setattr(parent, name, node)
    else:
        getattr(parent, name)[k] = node


def outcome(folder: Path, tests: list[str], limit_s: float) -> str:
    "Run tests until one fails: its name, `time limit`, or nothing where all passed."
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    child = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        text, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return "time limit"
    failed = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" ")[1] if failed else f"exit {child.returncode}" if child.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="the module to change, below this project")
    parser.add_argument(
        "--tests", required=True, help="arguments of pytest; files that catch most come first"
    )
    parser.add_argument("--sample", type=int, default=50, help="how many changes to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the record here after each change, too")
    args = parser.parse_args()
    tests = shlex.split(args.tests)
    name = args.module.resolve().relative_to(ROOT)
    found = mutants((ROOT / name).read_text(encoding="utf-8"))
    picked = random.Random(args.seed).sample(sorted(found), min(args.sample, len(found)))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in COPIED:
            if (ROOT / part).is_dir():
                shutil.copytree(
                    ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "out*.ipynb")
                )
            else:
                shutil.copy(ROOT / part, folder / part)
        start = time.monotonic()
        if failed := outcome(folder, tests, 3600):
            parser.error(f"the tests fail on the unchanged module: {failed}")
        limit_s = 60 + 4 * (time.monotonic() - start)
        record = {
            "module": str(name),
            "tests": args.tests,
            "seed": args.seed,
            "of": len(found),
            "caught": {},
            "survived": [],
        }
        for what in picked:
            (folder / name).write_text(found[what], encoding="utf-8")
            by = outcome(folder, tests, limit_s)
            if by:
                record["caught"][what] = by
            else:
                record["survived"].append(what)
            if args.out:
                args.out.write_text(json.dumps(record, indent=1))
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
