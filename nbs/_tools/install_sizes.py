"""Print what each extra of settings.ini installs, as the table of the front page: packages, and MB in site-packages.

Sizes are those of the environment that runs this script; an extra with a package that is not installed there has a dash. Torch is counted as it is
installed: a build without CUDA (`+cpu`) is far smaller than the one that PyPI has for Linux.
"""

from configparser import ConfigParser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def closure(wanted: list[Requirement]) -> dict[str, Distribution]:
    "Return the installed distributions that requirements bring, by name; raises PackageNotFoundError."
    found, todo, seen = dict[str, Distribution](), list(wanted), set[tuple[str, frozenset[str]]]()
    while todo:
        r = todo.pop()
        name = canonicalize_name(r.name)
        if (name, frozenset(r.extras)) in seen:
            continue
        seen.add((name, frozenset(r.extras)))
        found[name] = distribution(name)
        for text in found[name].requires or ():
            each = Requirement(text)
            if each.marker is None or any(each.marker.evaluate({"extra": e}) for e in ("", *r.extras)):
                todo.append(each)
    return found


def megabytes(found: dict[str, Distribution]) -> float:
    "Return the size of the files of distributions."
    files = (Path(str(d.locate_file(f))) for d in found.values() for f in d.files or ())
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def main() -> None:
    "Print a row for the base installation and for each extra."
    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    settings = parser["DEFAULT"]
    base = [Requirement(text) for text in settings["requirements"].split()]
    before = closure(base)
    print("| extra | packages | MB |\n| --- | ---: | ---: |")
    print(f"| none | {len(before)} | {megabytes(before):,.0f} |")
    extras = [k.removesuffix("_requirements") for k in settings if k.endswith("_requirements")]
    for extra in (e for e in extras if e not in ("dev", "all")):
        own = [Requirement(text) for text in settings[f"{extra}_requirements"].split()]
        try:
            more = {name: d for name, d in closure(own).items() if name not in before}
        except PackageNotFoundError:
            print(f"| `{extra}` | - | - |")
            continue
        print(f"| `{extra}` | {len(more)} | {megabytes(more):,.0f} |")


if __name__ == "__main__":
    main()
