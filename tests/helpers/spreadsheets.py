"Tables as spreadsheets save them."

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st


@dataclass(frozen=True)
class Dialect:
    "How a spreadsheet saves a table."

    encoding: str = "utf-8"
    delimiter: str = ","
    line_end: str = "\r\n"
    sep: bool = False  # a first line sep=;
    header: str = "lower"  # method of str
    blank: str = ""  # around the names of columns and the cells, except paths
    quoted: bool = False  # every cell
    empty_columns: int = 0  # at the right
    empty_rows: int = 0  # above, between and below
    cut: bool = False  # empty cells at the end of a row are left out


ORDINARY = Dialect(line_end="\n")
EXCEL_DE = Dialect("utf-8-sig", ";")
WINDOWS_DE = Dialect("cp1252", ";")
UNICODE_TEXT = Dialect("utf-16", "\t")
OLD_MAC = Dialect(delimiter=";", line_end="\r")
SEP_LINE = Dialect(delimiter=";", sep=True, header="title")
PADDED = Dialect("utf-8-sig", ";", header="upper", blank="\xa0 ", empty_columns=2, empty_rows=1)
CUT = Dialect(delimiter=";", cut=True)
NAMED = {
    "ordinary": ORDINARY,
    "German Excel": EXCEL_DE,
    "German Excel, plain CSV": WINDOWS_DE,
    "Unicode text": UNICODE_TEXT,
    "old Mac": OLD_MAC,
    "sep": SEP_LINE,
    "padded": PADDED,
    "cut": CUT,
}

dialects = st.builds(
    Dialect,
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-be"]),
    delimiter=st.sampled_from(",;\t"),
    line_end=st.sampled_from(["\r\n", "\n", "\r"]),
    sep=st.booleans(),
    header=st.sampled_from(["lower", "upper", "title"]),
    blank=st.sampled_from(["", " ", "\xa0", "\u202f "]),
    quoted=st.booleans(),
    empty_columns=st.integers(0, 2),
    empty_rows=st.integers(0, 2),
    cut=st.booleans(),
)


def as_saved(rows: Sequence[Sequence[str]], d: Dialect, exact: Sequence[int] = (0,)) -> bytes:
    "Return a table, the names of columns first; blanks are added to no cell of the `exact` columns."
    width = len(rows[0]) + d.empty_columns
    empty = [[""] * width for _ in range(d.empty_rows)]
    names, *others = [[*row, *[""] * (width - len(row))] for row in rows]
    names = [getattr(name, d.header)() for name in names]
    blanks = ["" if i in exact else d.blank for i in range(width)]
    body = [[b + cell + b if cell else "" for b, cell in zip(blanks, row, strict=False)] for row in others]
    lines = [[d.blank + name + d.blank for name in names], *empty, *body, *empty]
    if d.cut:
        lines = [
            row[: max((i + 1 for i, cell in enumerate(row) if cell.strip()), default=1)] for row in lines
        ]
    text = io.StringIO(newline="")
    csv.writer(
        text,
        delimiter=d.delimiter,
        lineterminator=d.line_end,
        quoting=csv.QUOTE_ALL if d.quoted else csv.QUOTE_MINIMAL,
    ).writerows(lines)
    begin = (f"sep={d.delimiter}{d.line_end}" if d.sep else "") + (d.delimiter + d.line_end) * d.empty_rows
    mark = "\ufeff" if d.encoding == "utf-16-be" else ""
    return (mark + begin + text.getvalue()).encode(d.encoding)


def saved_again(data: bytes, d: Dialect, numbers: Sequence[str] = ()) -> bytes:
    "Open a table that leakmel wrote in a spreadsheet, and save it; the columns with `numbers` get decimal commas unless the delimiter is one."
    rows = list(csv.reader(io.StringIO(data.decode(), newline="")))
    places = [i for i, name in enumerate(rows[0]) if name in numbers and d.delimiter != ","]
    for row in rows[1:]:
        for i in places:
            row[i] = row[i].replace(".", ",")
    return as_saved(rows, replace(d, blank=""))
