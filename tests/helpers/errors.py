"Expect an error of leakmel by its code and its facts instead of by the words of its message."

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from leakmel.core.errors import LeakmelError, show_path


class Caught:
    "The error that was raised; `value` is set when the block has ended."

    value: Any  # of the class that was expected


@contextmanager
def raises(
    code: str, kind: type[LeakmelError] = LeakmelError, *, says: str = "", **facts: Any
) -> Iterator[Caught]:
    """Expect a LeakmelError with this code, of this class, with these attributes (path, found, expected, remedy).

    `says` is a value (a number, a name) that the message has to contain, not a sentence.
    """
    caught = Caught()
    with pytest.raises(kind) as info:
        yield caught
    caught.value = error = info.value
    assert error.code == code, f"code {error.code!r}: {error}"
    for name, expected in facts.items():
        value = getattr(error, name)
        if name == "path":
            shown = None if value is None else show_path(value)
            assert shown == show_path(expected), f"path {shown}: {error}"
        else:
            assert value == expected, f"{name} {value!r}: {error}"
    assert says in str(error), f"{says!r} is not in: {error}"
