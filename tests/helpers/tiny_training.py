"Tiny trainings, and processes that end at a moment of one's choice: what tests of training and of searching share."

from pathlib import Path

from leakmel.detector.model.settings import TrainSettings

FEW_TREES = 20  # of each forest; a tenth of the usual ones


def tiny(epochs: int) -> TrainSettings:
    "Settings of a training of seconds on `small_sets`: six steps in an epoch."
    return TrainSettings(
        detector="cnn",
        epochs=epochs,
        epoch_share=1.0,
        batch_size=200,
        channels=(4, 8),
        learning_rate=0.01,
        early_stop_epochs=0,
        seed=3,
    )


def tiny_words(epochs: int) -> list[str]:
    "The same on the command line."
    return [
        "--detector",
        "cnn",
        "--epochs",
        str(epochs),
        "--epoch-share",
        "1",
        "--batch-size",
        "200",
        "--channels",
        "4,8",
        "--learning-rate",
        "0.01",
        "--early-stop-epochs",
        "0",
        "--seed",
        "3",
        "--device",
        "cpu",
        "--quiet",
    ]


def use_few_trees() -> None:
    "Let the forests that this process fits have a tenth of their trees, as the fixture `few_trees` does: for workers of a cluster."
    from leakmel.detector.model import spectral

    spectral.N_TREES = FEW_TREES


def files(sets: Path) -> tuple[Path, Path]:
    "Data sets to learn from and to judge by."
    return sets / "TRAINING_DATASET.H5", sets / "VALIDATION_DATASET.H5"


# Much is loaded when it is first used: the command is run before the first child, with one thread, which has no others beside it.
_IMPORTS = """
import contextlib, io, os, tempfile, torch
torch.set_num_threads(1)
from leakmel.cli import main
with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
    words = {words} + [{sets!r}, "--out", place + "/run", "--detector", "cnn", "--epochs", "1", "--channels", "2", "--device", "cpu", "--quiet"]
    assert main(words) == 0
"""
_AT_A_MOMENT = """
import itertools, signal
{imports}
count = itertools.count(1)
def counting(real):
    def counted(*args, **named):
        if next(count) == {at}: os.kill(os.getpid(), {number})
        return real(*args, **named)
    return counted
for owner, names in {owners}:
    for name in names: setattr(owner, name, counting(getattr(owner, name)))
if {at} == 0:
    import atexit
    atexit.register(lambda: print("moments", next(count)))
"""
_AT_EVERY_MOMENT = """
import hashlib, itertools, os, shutil
from pathlib import Path
{imports}
count, seen, out, place = itertools.count(1), {{}}, Path({out!r}), Path({place!r})
def look():
    at, state = next(count), hashlib.sha256()
    for path in sorted(out.rglob("*")): state.update(repr((str(path), path.is_file() and path.read_bytes())).encode())
    if out.is_dir() and seen.setdefault(state.digest(), at) == at: shutil.copytree(out, place / str(at))
def looking(real):
    def looked(*args, **named):
        look()
        return real(*args, **named)
    return looked
for owner, names in {owners}:
    for name in names: setattr(owner, name, looking(getattr(owner, name)))
import atexit
atexit.register(lambda: print("moments", next(count)))
"""


def loaded(sets: Path, *words: str, more: str = "") -> str:
    "Code for `children.server`: a command of leakmel on tiny sets has been run once; `more` is imported before."
    return more + _IMPORTS.format(words=list(words), sets=str(sets))


def at_a_moment(imports: str, owners: str, number: int, at: int) -> str:
    "Code for a child: signal `number` comes at the call `at`, counted from 1, of what `owners` names; 0: none comes, and the calls are told."
    return _AT_A_MOMENT.format(imports=imports, owners=owners, number=int(number), at=at)


def at_every_moment(imports: str, owners: str, out: Path, place: Path) -> str:
    """Code for a child: before each call of what `owners` names, its folder is copied to `place`, under the number of the call, unless it is as it was before.

    A process that is killed at a call leaves its folder as it is then: what it had not yet given to the system is in no copy either.
    """
    return _AT_EVERY_MOMENT.format(imports=imports, owners=owners, out=str(out), place=str(place))


def n_moments(out: str) -> int:
    "How many calls a child told of."
    return int(out.split("moments")[1])
