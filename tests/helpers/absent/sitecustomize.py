"Python without the packages that LEAKMEL_ABSENT names, for example `triton,pyarrow`: conftest.py puts this folder on the path of all processes."

import os
from importlib.machinery import PathFinder

ABSENT = set(filter(None, os.environ.get("LEAKMEL_ABSENT", "").split(",")))
_find = PathFinder.find_spec


def find_spec(cls, name, path=None, target=None):
    "Find nothing of the absent packages, as if they were not installed."
    return None if name.split(".")[0] in ABSENT else _find(name, path, target)


PathFinder.find_spec = classmethod(find_spec)  # type: ignore[method-assign, assignment]
