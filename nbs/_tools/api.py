"""Reference pages from signatures, docstrings and the comments beside parameters: one for each module, one for the names of `import leakmel as lm`."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from leakmel.core.parameters import source_comments


def public_page() -> str:
    "One page: what `import leakmel as lm` gives, first as a list, then with its parameters."
    import leakmel

    parts = ["# Public names", "```{py:module} leakmel\n:no-index-entry:\n```", PUBLIC_TEXT]
    values = {name: (module, getattr(leakmel, name)) for name, module in leakmel._PUBLIC.items()}
    rows = [
        [f"{{py:obj}}`lm.{name} <leakmel.{name}>`", _first(value), f"`leakmel.{module}`"]
        for name, (module, value) in values.items()
    ]
    parts.append(
        "\n".join(
            "| " + " | ".join(row) + " |"
            for row in [["name", "what it is", "written in"], [":--"] * 3, *rows]
        )
    )
    parts += [
        _class(value) if inspect.isclass(value) else _entry("function", name, value)
        for name, (_, value) in values.items()
    ]
    return "\n\n".join(parts) + "\n"


PUBLIC_TEXT = """What scripts, notebooks and other programs rely on. `import leakmel as lm` itself is light: a name loads its module when
it is first used. Errors derive from `lm.LeakmelError` and say what was found, what was expected and what to do."""


def _first(value: Any) -> str:
    "The first sentence of a docstring, for a table."
    return _cell((inspect.getdoc(value) or "").split("\n")[0])


def own_names(module: Any) -> list[str]:
    "The names that a module defines, without private ones."
    found: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [each.id for t in targets for each in ast.walk(t) if isinstance(each, ast.Name)]
    return list(dict.fromkeys(each for each in found if not each.startswith("_")))


def module_page(name: str) -> str:
    "One page: what a module exports."
    module = importlib.import_module(name)
    short = name.removeprefix("leakmel.")
    up = "../" * (short.count(".") + 1)
    parts = [
        f"# {short}",
        f"```{{py:module}} {name}\n:no-index-entry:\n```",
        f"{(inspect.getdoc(module) or '').rstrip('.')}. The [notebook]({up}reference/{short.replace('.', '/')}.ipynb) explains the design.",
    ]
    for public in own_names(module):
        value = getattr(module, public)
        if inspect.isclass(value):
            parts.append(_class(value))
        elif inspect.isfunction(value):
            parts.append(_entry("function", public, value))
        else:
            parts.append(_directive("data", public, [], _shown(value)))
    return "\n\n".join(parts) + "\n"


def _directive(kind: str, signature: str, options: list[str], *body: str, fence: str = ":::") -> str:
    "A description of the Python domain."
    return "\n".join(
        [f"{fence}{{py:{kind}}} {signature}", *options, "", *(b + "\n" for b in body if b), fence]
    )


def _shown(value: Any) -> str:
    "A constant's value, where it fits on a line."
    if isinstance(value, Path):  # of the machine that makes the site
        return ""
    is_set = isinstance(value, frozenset)
    text = f"frozenset({sorted(value)})" if is_set else repr(value)
    return f"`{text}`" if len(text) <= 120 and "`" not in text and " at 0x" not in text else ""


def _class(cls: type) -> str:
    "A class with its fields or its constructor's parameters, and its public methods and properties."
    body = [_prose(cls)]
    if dataclasses.is_dataclass(cls):
        body.append(_table(cls))
    elif "__init__" in vars(cls):
        body.append(_table(vars(cls)["__init__"]))
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, (classmethod, staticmethod)):
            body.append(_entry("method", name, member.__func__, "::::", type(member).__name__))
        elif inspect.isfunction(member):
            body.append(_entry("method", name, member, "::::"))
        elif isinstance(member, property):
            body.append(_directive("property", name, [], _prose(member), fence="::::"))
    return _directive(
        "class", cls.__name__ + _signature(cls, short=dataclasses.is_dataclass(cls)), [], *body, fence=":::::"
    )


def _entry(kind: str, full: str, function: Any, fence: str = ":::", how: str = "") -> str:
    "A function or method."
    options = [f":{how}:"] if how else []
    signature = _signature(function, bound=kind == "method" and how != "staticmethod")
    return _directive(kind, full + signature, options, _prose(function), _table(function), fence=fence)


def _prose(value: Any) -> str:
    "The docstring, unless it is the one that a dataclass makes up."
    # without what `lm.NAME` adds for `help`: the table of parameters says it
    text = re.split(r"\n\n(?:Parameters|Returns)\n-+\n", inspect.getdoc(value) or "")[0]
    return (
        ""
        if inspect.isclass(value) and text.startswith(f"{value.__name__}(")
        else re.sub(r"(?<=\S)\*(?=\S)", r"\\*", text)
    )


def _signature(value: Any, *, bound: bool = False, short: bool = False) -> str:
    "Names and defaults; types stand in the table."
    if short:
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()][
        int(bound) :
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r"<(?:[^<>]|<[^<>]*>)*>", "...", text)


def _typed(value: Any) -> dict[str, tuple[Any, Any]]:
    "Type and default by parameter; `return` for the result."
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return {}
    empty = inspect.Parameter.empty
    typed = {name: (p.annotation, p.default) for name, p in signature.parameters.items()}
    guessed = {name: (type(default), default) for name, (anno, default) in typed.items() if anno is empty}
    typed |= {name: pair for name, pair in guessed.items() if pair[1] is not empty}
    return typed | {"return": (signature.return_annotation, empty)}


def _table(value: Any) -> str:
    """The table of a function's parameters and of its result, or of a dataclass's fields, inherited ones too.

    Name, type, default and comment; nothing where nobody said a type or a word.
    """
    typed, comments = _typed(value), source_comments(value)
    if inspect.isclass(value):
        typed = {name: typed[name] for name in getattr(value, "__dataclass_fields__", {}) if name in typed}
    cells = [
        [
            "returns" if name == "return" else f"`{name}`",
            _type(anno),
            _default(default),
            _cell(comments.get(name, "")),
        ]
        for name, (anno, default) in typed.items()
        if name != "self" and (comments.get(name) or _type(anno))
    ]
    if not cells:
        return ""
    cells = [["", "type", "default", ""], [":--"] * 4, *cells]
    if not any(row[2] for row in cells[2:]):
        cells = [[row[0], row[1], row[3]] for row in cells]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _type(anno: Any) -> str:
    if anno is None or anno is inspect.Parameter.empty:
        return ""
    text = anno if isinstance(anno, str) else inspect.formatannotation(anno)
    text = text.replace(inspect.formatannotation(ArrayLike), "ArrayLike")  # a union of ten types
    short = re.sub(r"(?:[A-Za-z_]\w*[.])+(?=[A-Za-z_])", "", text)  # the last part of a name says enough
    return f"`{_cell(short)}`"


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty or value is dataclasses.MISSING:
        return ""
    text = repr(value)
    return "" if text.startswith("<") else f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|")
