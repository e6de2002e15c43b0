"""A synthetic tree of recordings with the faults that occur in practice, and the list of planted files.

Nothing of leakmel is imported here, on purpose. `write_messy(root)` writes some 200 recordings of about a second into three splits and returns a
`Messy`: for each file whether it becomes a row, with which status, or why not, and every problem that a report has to name, for a data set of
4,096 Hz and one second. What is planted follows from how the files are made, by the rules of the documentation; no file is read back.
"""

import io
import os
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import soundfile
from odd_wavs import EXTRAS, ONES, REFUSED, chunk, fmt, riff, sub_format

RATE = 4096  # Hz, of most recordings and of the data sets
SPLITS = {"TRAINING": "dataset_Training", "VALIDATION": "validation", "TESTING": "TEST"}  # split: its folder
LABELS = ("LEAK", "NOLEAK", "QUIET", "leak")  # in the order of their bytes
LOUD, SOFT = 0.1, 0.01  # levels of LEAK and of the others, of full scale


@dataclass(frozen=True)
class Planted:
    "One file that a walk finds, and what has to become of it."

    split: str
    path: bytes  # relative to the folder of the split
    label: str | None  # None: it lies in no label folder
    status: str = ""  # of its row; empty: rejected
    code: str = ""  # of its rejection; empty: a row
    kinds: frozenset[str] = frozenset()  # of the problems that name it
    fields: tuple[str, ...] = ()  # sensor, recording, time and gain, where the name has them
    payload: bytes = b""  # sample bytes of a row that is not silent: equal ones are copies
    encoding: str = ""

    @property
    def below_root(self) -> bytes:
        "Path relative to the root."
        return os.fsencode(SPLITS[self.split]) + b"/" + self.path


@dataclass
class Messy:
    "What was planted."

    root: Path
    files: list[Planted] = field(default_factory=list)
    places: set[tuple[str, str]] = field(
        default_factory=set
    )  # kind and place of problems that name a folder, a link or a sensor
    tied: set[tuple[str, str, str]] = field(default_factory=set)  # split, label and what gives it away

    def of(self, split: str) -> list[Planted]:
        "The files of a split in the order of the bytes of their paths."
        return sorted((f for f in self.files if f.split == split), key=lambda f: f.path)

    @property
    def rows(self) -> list[Planted]:
        "The files that become rows."
        return [f for f in self.files if f.status]


# -- sounds -----------------------------------------------------------------------------------------------------------


def make_sound(seed: int, level: float = SOFT, n: int = RATE, channels: int = 1) -> np.ndarray:
    "Noise with a tone in it, [n, channels] in steps of 16 bits, without an offset."
    x = (
        np.random.default_rng(seed).normal(0, level, (n, channels))
        + 0.7 * level * np.sin(0.01 * (seed % 200 + 5) * np.arange(n))[:, None]
    )
    return np.round((x - x.mean(axis=0)) * 32_768) / 32_768


def pcm(x: np.ndarray, order: str = "<") -> bytes:
    "16-bit sample bytes."
    return np.round(x * 32_768).clip(-32_768, 32_767).astype(f"{order}i2").tobytes()


def wav(
    x: np.ndarray, rate: int = RATE, subtype: str = "PCM_16", container: str = "WAV", endian: str = "FILE"
) -> bytes:
    "A file as libsndfile writes it."
    out = io.BytesIO()
    soundfile.write(out, x, rate, format=container, subtype=subtype, endian=endian)
    return out.getvalue()


class _Maker:
    "Writes files and notes what they are."

    def __init__(self, root: Path):
        self.made, self.seed = Messy(root), 0

    def next(self) -> int:
        self.seed += 1
        return self.seed

    def put(self, split: str, name: str | bytes, content: bytes) -> bytes:
        "Write a file; returns its path relative to the split."
        path = os.fsencode(name)
        full = os.path.join(os.fsencode(self.made.root / SPLITS[split]), path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as f:
            f.write(content)
        return path

    def row(
        self,
        split: str,
        name: str | bytes,
        x: np.ndarray | None = None,
        *,
        rate: int = RATE,
        content: bytes | None = None,
        kinds: tuple[str, ...] = (),
        mono: str = "",
        encoding: str = "pcm16",
        subtype: str = "PCM_16",
        silent: bool = False,
    ) -> Planted:
        "A recording that becomes a row; status and the kinds that follow from rate, length and channels are worked out here."
        label = os.fsdecode(name).split("/")[0]
        x = make_sound(self.next(), LOUD if label == "LEAK" else SOFT, rate) if x is None else x
        path = self.put(split, name, wav(x, rate, subtype) if content is None else content)
        n, channels = len(x), x.shape[1]
        fit = n * RATE / rate
        words = (
            [mono] * (channels > 1)
            + ["resampled"] * (rate != RATE)
            + ["padded"] * (fit < RATE)
            + ["cut"] * (fit > RATE)
        )
        odd = {
            "other_rate": rate != RATE,
            "other_length": n != rate,
            "stereo": channels > 1,
            "opposite_phase": "opposite" in mono,
            "silent": silent,
        }
        fields = tuple(os.path.splitext(os.path.basename(os.fsdecode(name)))[0].split("~"))
        kinds += tuple(k for k, yes in odd.items() if yes) + (("gain_1",) if fields[-1:] == ("1",) else ())
        planted = Planted(
            split,
            path,
            label,
            "+".join(words) or "ok",
            "",
            frozenset(kinds),
            fields if len(fields) == 4 else (),
            b"" if silent else (pcm(x) if encoding == "pcm16" else content or x.tobytes()),
            encoding,
        )
        self.made.files.append(planted)
        return planted

    def refused(self, split: str, name: str | bytes, content: bytes, code: str) -> None:
        "A file that becomes no row."
        path = self.put(split, name, content)
        label = os.fsdecode(path).split("/")[0] if b"/" in path else None
        why = (
            {code} if label else {code, "no_label"}
        )  # a scan says both; a build does not read what has no label
        self.made.files.append(Planted(split, path, label, "", code if label else "no_label", frozenset(why)))


# -- the parts of the tree ----------------------------------------------------------------------------------------------


def _plain(m: _Maker) -> None:
    "Recordings as they should be: some with the logger's names, some deeper; LEAK is loud, and nobody else records at 8,000 Hz but in QUIET."
    for split, label, n in (
        ("TRAINING", "LEAK", 22),
        ("TRAINING", "NOLEAK", 22),
        ("TRAINING", "QUIET", 8),
        ("VALIDATION", "LEAK", 7),
        ("VALIDATION", "NOLEAK", 12),
        ("TESTING", "LEAK", 7),
        ("TESTING", "NOLEAK", 12),
    ):
        for k in range(n):
            session = ("", "session 1/", "session 2/deeper/")[k % 3]
            m.row(
                split,
                f"{label}/{session}H{k % 4}~r{k:02d}~202501{k + 1:02d}_020000~8.wav"
                if k % 2
                else f"{label}/{session}plain {k:02d}.wav",
            )
    for k in range(18):
        m.row("TRAINING", f"QUIET/H5~fast{k:02d}~20250201_0200{k:02d}~8.WAV", rate=8000)
    m.made.tied = {("TRAINING", "QUIET", "sample rate"), *((split, "LEAK", "level") for split in SPLITS)}
    m.row("TRAINING", "leak/a class of its own.wav")
    os.makedirs(m.made.root / SPLITS["TESTING"] / "QUIET")  # empty; in VALIDATION it is not even there
    m.made.places |= {
        ("empty_label", f"{SPLITS[split]}/{label}")
        for split in ("VALIDATION", "TESTING")
        for label in ("QUIET", "leak")
    }
    m.made.places.add(("case_twins", "LEAK, leak"))


def _formats(m: _Maker) -> None:
    "Every rate, length, number of channels and encoding that is made to fit."
    for split in SPLITS:
        for rate in (292, 48_000):
            m.row(split, f"NOLEAK/rate {rate}.wav", rate=rate)
        m.row(split, "LEAK/rate 48000 short.wav", make_sound(m.next(), LOUD, 24_000), rate=48_000)
        m.row(split, "LEAK/rate 292 long.wav", make_sound(m.next(), LOUD, 438), rate=292)
        m.row(split, "LEAK/short.wav", make_sound(m.next(), LOUD, 2100))
        m.row(split, "LEAK/long.wav", make_sound(m.next(), LOUD, 6144))
        m.row(split, "NOLEAK/one sample short.wav", make_sound(m.next(), n=RATE - 1))
        m.row(split, "NOLEAK/one sample long.wav", make_sound(m.next(), n=RATE + 1))
        m.row(split, "NOLEAK/stereo.wav", make_sound(m.next(), channels=2), mono="downmixed")
        m.row(
            split, "NOLEAK/twins.wav", np.repeat(make_sound(m.next()), 2, axis=1), mono="identical_channels"
        )
        m.row(split, "NOLEAK/opposite.wav", make_sound(m.next()) * [[1, -1]], mono="downmixed+opposite_phase")
    wide = make_sound(m.next(), n=30_000, channels=2)
    m.row(
        "TESTING",
        "NOLEAK/stereo 48000 24 bits short.wav",
        wide,
        rate=48_000,
        mono="downmixed",
        subtype="PCM_24",
        encoding="pcm24",
    )
    for split, label in (("TRAINING", "NOLEAK"), ("TESTING", "LEAK")):
        level = LOUD if label == "LEAK" else SOFT
        for subtype, encoding in (
            ("PCM_U8", "pcm8"),
            ("PCM_24", "pcm24"),
            ("PCM_32", "pcm32"),
            ("FLOAT", "float32"),
            ("DOUBLE", "float64"),
            ("ALAW", "alaw"),
            ("ULAW", "ulaw"),
        ):
            m.row(
                split,
                f"{label}/{encoding}.wav",
                make_sound(m.next(), level),
                subtype=subtype,
                encoding=encoding,
            )
    _containers(m)


def _containers(m: _Maker) -> None:
    "Headers that are unusual and right."

    def made(name: str, content: object, encoding: str = "pcm16", n: int = RATE) -> None:
        x = make_sound(m.next(), LOUD, n)
        m.row("TRAINING", f"LEAK/headers/{name}.wav", x, content=content(x), encoding=encoding)  # type: ignore[operator]

    made("extensible", lambda x: riff(sub_format(16), chunk(b"data", pcm(x))))
    made("RF64", lambda x: wav(x, container="RF64"))
    made("RIFX", lambda x: wav(x, endian="BIG", subtype="PCM_24"), "pcm24")
    made(
        "chunks",
        lambda x: riff(
            EXTRAS["odd"], EXTRAS["bext"], fmt(), EXTRAS["LIST"], chunk(b"data", pcm(x)), EXTRAS["cue"]
        ),
    )
    made("streamed", lambda x: riff(fmt(), chunk(b"data", pcm(x), size=ONES), size=ONES))
    made("rubbish behind", lambda x: riff(fmt(), chunk(b"data", pcm(x))) + b"\0\1 not a chunk")


ODD = {  # of odd_wavs, by split
    "TRAINING": (
        "no bytes",
        "large-file pointer",
        "HTML page",
        "zeros",
        "pcm16 cut",
        "pcm24 cut",
        "RF64 size lies",
        "24 bits in 4 bytes",
        "unknown tag",
        "IMA ADPCM",
        "GSM 6.10",
        "rate 0",
        "65 channels",
        "0 channels",
        "NaN",
        "infinity",
        "half a sample",
        "RF64 without ds64",
        "1,001 chunks",
    ),
    "VALIDATION": (
        "no bytes",
        "gzip",
        "data size lies, 24 bits",
        "block align 3",
        "65,535 channels",
        "64 bits beyond float32",
    ),
    "TESTING": (
        "no bytes",
        "JSON",
        "chunk before the samples lies",
        "RF64 of two sizes",
        "float of 16 bits",
        "NaN in the second channel",
        "half a frame",
    ),
}


def _refused(m: _Maker) -> None:
    "Files that cannot be used, and files without a label."
    for split, names in ODD.items():
        for k, name in enumerate(names):
            m.refused(split, f"{LABELS[k % 2]}/odd/{name}.wav", REFUSED[name].content, REFUSED[name].code)
    wild = riff(fmt(3, bits=32), chunk(b"data", struct.pack("<f", 1e20) * RATE))
    m.refused("TRAINING", "NOLEAK/louder than the sun.wav", wild, "unsupported")
    m.refused("VALIDATION", "LEAK/a pipe says what it is.wav", wav(make_sound(1))[:4000], "truncated")
    path = m.put("TRAINING", "loose.wav", wav(make_sound(m.next())))
    m.made.files.append(Planted("TRAINING", path, None, "", "no_label", frozenset({"no_label"})))
    m.put("TRAINING", ".trash/thrown away.wav", wav(make_sound(m.next())))
    m.refused("TESTING", "loose, and no recording.wav", b"shopping list", "not_wav")
    secret = m.row("TESTING", "LEAK/secret.wav")
    os.chmod(m.made.root / SPLITS["TESTING"] / "LEAK" / "secret.wav", 0)
    if os.access(m.made.root / SPLITS["TESTING"] / "LEAK" / "secret.wav", os.R_OK):
        return  # by root: a row like any other
    m.made.files[-1] = Planted("TESTING", secret.path, "LEAK", "", "unreadable", frozenset({"unreadable"}))


def _names(m: _Maker) -> None:
    "Names that shells, tables and terminals break on."
    for name in (
        "  blanks  .wav",
        "quo\"tes'.wav",
        "new\nline\ttab.wav",
        "-rf.wav",
        "--out=x.wav",
        "Twin.wav",
        "twin.wav",
        "TWIN.WAVE",
        "caf\u00e9.wav",
        "cafe\u0301.wav",
        "a,b;c.wav",
        "\x1b[31mred.wav",
        "<b>&amp;.wav",
        "$(x) `y` *?.wav",
        "{label}.wav",
        "x" * 240 + ".wav",
        "a~b.wav",
        "~~~.wav",
    ):
        m.row("TRAINING", f"NOLEAK/names/{name}")
    for raw in (b"latin \xe9.wav", b"\xff\xfe~r~20250101_000000~8.wav", b"-\xe9/\xe9.wav"):
        m.row("VALIDATION", b"NOLEAK/" + raw)


def _sound_faults(m: _Maker) -> None:
    "Clipped, silent, off centre, dry; a sensor that never recorded anything."
    sine = np.round(np.sin(0.1 * np.arange(RATE))[:, None] * 1.5 * 32_768).clip(-32_768, 32_767) / 32_768
    m.row("TRAINING", "LEAK/clipped.wav", sine, kinds=("clipped",))
    m.row("TESTING", "LEAK/clipped.wav", sine[::-1], kinds=("clipped",))
    m.row("TRAINING", "NOLEAK/silent.wav", np.zeros((RATE, 1)), silent=True)
    m.row("VALIDATION", "NOLEAK/silent, off centre.wav", np.full((RATE, 1), 300 / 32_768), silent=True)
    for split, offset in (("TRAINING", 0.05), ("TESTING", -0.05)):
        m.row(
            split,
            "NOLEAK/dc.wav",
            make_sound(m.next()) + np.round(offset * 32_768) / 32_768,
            kinds=("dc_offset",),
        )
    for split in SPLITS:
        m.row(split, f"NOLEAK/H2~dry~20250301_000000~1{'.wave' if split == 'TESTING' else '.wav'}")
    for k in range(4):
        x = np.zeros((RATE, 1)) if k % 2 else np.random.default_rng(k).integers(-1, 2, (RATE, 1)) / 32_768
        m.row("TRAINING", f"NOLEAK/H9~dead{k}~20250401_00000{k}~8.wav", x, silent=bool(k % 2))
    m.made.places.add(("dead_sensor", "H9"))


def _copies(m: _Maker) -> None:
    "The same samples in a split, in two splits, under two labels."
    once, twice, thrice, lent = (
        make_sound(m.next()),
        make_sound(m.next(), LOUD),
        make_sound(m.next(), LOUD),
        make_sound(m.next()),
    )
    for name in ("copy 1.wav", "copy 2.wav", "session 1/copy 3.wav"):
        m.row("TRAINING", f"NOLEAK/{name}", once)
    for label in LABELS[:2]:
        m.row("TRAINING", f"{label}/two labels.wav", twice)
    m.row("TRAINING", "LEAK/lent.wav", thrice)
    m.row("TESTING", "NOLEAK/lent, and called something else.wav", thrice)
    for split in ("TRAINING", "VALIDATION"):
        m.row(split, "NOLEAK/lent.wav", lent)


def _links(m: _Maker) -> None:
    "Links that are followed and links that are not; things that are no files; files that are no recordings."
    root, made = m.made.root, m.made
    outside = root.parent / f"{root.name} outside"
    (outside / "LEAK").mkdir(parents=True)
    (outside / "LEAK" / "private.wav").write_bytes(wav(make_sound(m.next())))
    training = root / SPLITS["TRAINING"]
    for name, to in (
        ("LEAK/out.wav", outside / "LEAK" / "private.wav"),
        ("LEAK/out", outside / "LEAK"),
        ("LEAK/circle.wav", Path("circle.wav")),
        ("LEAK/nowhere.wav", Path("nothing.wav")),
        ("LINKED", outside / "LEAK"),
        ("NOLEAK/root", root),
    ):
        (training / name).symlink_to(to)
    (training / "NOLEAK" / "round").symlink_to("..")  # to the split: what is in there is there already
    made.places |= {
        ("link", f"{training.name}/{name}")
        for name in (
            "LEAK/out.wav",
            "LEAK/out",
            "LEAK/circle.wav",
            "LEAK/nowhere.wav",
            "LINKED",
            "NOLEAK/root",
            "NOLEAK/round",
        )
    }
    (training / "NOLEAK" / "linked.wav").symlink_to(root / SPLITS["VALIDATION"] / "NOLEAK" / "plain 00.wav")
    (training / "NOLEAK" / "again").symlink_to(Path("../..") / SPLITS["VALIDATION"] / "NOLEAK" / "session 1")
    for f in made.of("VALIDATION"):
        if f.path == b"NOLEAK/plain 00.wav":
            made.files.append(replace(f, split="TRAINING", path=b"NOLEAK/linked.wav"))
        if f.path.startswith(b"NOLEAK/session 1/"):
            made.files.append(replace(f, split="TRAINING", path=b"NOLEAK/again/" + os.path.basename(f.path)))
    os.mkfifo(training / "LEAK" / "pipe.wav")
    made.places |= {("special", f"{training.name}/LEAK/pipe.wav"), ("passed_over", f"{training.name}/.trash")}
    m.row("TRAINING", "LEAK/folder.wav/inside.wav")
    for name in (
        "LEAK/.hidden.wav",
        "LEAK/notes.txt",
        "LEAK/._plain 00.wav",
        "Thumbs.db",
        "LEAK/wav",
        "LEAK/x.wav.part",
    ):
        m.put("TRAINING", name, b"not a recording")
    (root / "extra" / "LEAK").mkdir(parents=True)
    (root / "extra" / "LEAK" / "a.wav").write_bytes(wav(make_sound(m.next())))
    (root / "beside.wav").write_bytes(wav(make_sound(m.next())))
    made.places |= {("not_a_split", "extra"), ("not_a_split", "beside.wav")}


def _note_copies(made: Messy) -> None:
    "Say of each recording whether its samples are there before: in the order of splits, then of the bytes of the paths."
    order, first, first_in = list(SPLITS), dict[bytes, Planted](), dict[tuple[str, bytes], Planted]()
    for f in sorted(made.rows, key=lambda f: (order.index(f.split), f.path)):
        if not f.payload:
            continue
        origin, here = first.setdefault(f.payload, f), first_in.setdefault((f.split, f.payload), f)
        copied = {
            "duplicate": here is not f,
            "duplicate_across_splits": origin.split != f.split,
            "duplicate_labels": origin.label != f.label,
        }
        made.files[made.files.index(f)] = replace(f, kinds=f.kinds | {k for k, yes in copied.items() if yes})


def write_messy(
    root: Path,  # made here
) -> Messy:
    "Write the tree."
    m = _Maker(root)
    for part in (_plain, _formats, _refused, _names, _sound_faults, _copies, _links):
        part(m)
    _note_copies(m.made)
    return m.made
