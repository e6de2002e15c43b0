"""Collect every error of the package: its code, its message and what the message tells the user to do.

usage: python nbs/_tools/messages.py     prints all of them, by code; the page of error codes shows the same
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from house import ROOT, classes_with_code, error_classes, sources


@dataclass(frozen=True)
class Message:
    "An error as it is written in the source; values that are put in stand in braces."

    code: str
    error: str  # its class
    text: str
    remedy: str  # empty where there is none
    place: str  # file and line


def placeholder(node: ast.AST) -> str:
    "A word for a value that is put into a message: its name, without the code around it."
    if isinstance(node, ast.Name):
        return "reason" if node.id == "e" else node.id.strip("_").lower()
    if isinstance(node, ast.Attribute):
        known = {"__name__": "error", "strerror": "reason", "returncode": "exit status"}
        return known.get(node.attr, node.attr)
    if isinstance(node, ast.Call):
        function = placeholder(node.func)
        if function in ("show_path", "percent", "join", "str", "repr", "len") and node.args:
            return placeholder(node.args[0])
        if isinstance(node.func, ast.Attribute) and function in ("get", "strip", "decode"):
            return placeholder(node.func.value)
        return function
    if isinstance(node, ast.GeneratorExp):
        return placeholder(node.generators[0].iter)
    if isinstance(node, ast.Subscript):
        return placeholder(node.value)
    return "number" if isinstance(node, ast.BinOp) else "value"


def template(node: ast.expr | None) -> str:
    "The text of a string expression, with what is put in as {name}."
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts.append(str(value.value))
            elif isinstance(value, ast.FormattedValue) and isinstance(value.value, ast.IfExp):
                parts.append(template(value.value))
            elif isinstance(value, ast.FormattedValue):
                parts.append("{" + placeholder(value.value) + "}")
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (template(node.body), template(node.orelse))))
    return "{" + placeholder(node) + "}"


def messages(root: Path = ROOT) -> Iterator[Message]:
    "Every call of an error class with a code, in the order of files and lines."
    files = sources(root)
    trees: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    family = error_classes(trees) | classes_with_code(trees)
    for path, tree in zip(files, trees, strict=True):
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in family
            ):
                continue
            words = {word.arg: word.value for word in node.keywords if word.arg}
            arguments = iter(node.args)
            code = next(arguments, None) if node.func.id == "RecordingError" else words.get("code")
            text = next(arguments, None)
            if isinstance(code, ast.Constant) and text is not None:
                yield Message(
                    str(code.value).replace("_", "-"),
                    node.func.id,
                    template(text),
                    template(words.get("remedy")),
                    f"{path.relative_to(root)}:{node.lineno}",
                )


if __name__ == "__main__":
    for m in sorted(messages(), key=lambda m: (m.code, m.place)):
        print(f"{m.code}: {m.text}" + (f" | {m.remedy}" if m.remedy else "") + f"   [{m.place}]")
    sys.exit(0)
