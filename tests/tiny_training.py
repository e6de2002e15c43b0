"Tiny trainings, and processes that end at a moment of one's choice: what tests of training and of searching share."
from pathlib import Path

from leakmel.learn.train_settings import TrainSettings


def tiny(epochs: int) -> TrainSettings:
    "Settings of a training of seconds on `small_sets`: six steps in an epoch."
    return TrainSettings(epochs=epochs, epoch_share=1.0, batch_size=200, channels=(4, 8), learning_rate=0.01, early_stop_epochs=0, seed=3)


def tiny_words(epochs: int) -> list[str]:
    "The same on the command line."
    return ["--epochs", str(epochs), "--epoch-share", "1", "--batch-size", "200", "--channels", "4,8", "--learning-rate", "0.01",
            "--early-stop-epochs", "0", "--seed", "3", "--device", "cpu", "--quiet"]


def files(sets: Path) -> tuple[Path, Path]:
    "Data sets to learn from and to judge by."
    return sets / "TRAINING_DATASET.H5", sets / "VALIDATION_DATASET.H5"


# Much is loaded when it is first used: the command is run before the first child, with one thread, which has no others beside it.
_IMPORTS = """
import contextlib, io, os, tempfile, torch
torch.set_num_threads(1)
import leakmel as lm
from leakmel.cli import main
from leakmel.learn import training_runs
with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
    lm.write_demo(place + "/town", n_files=40)
    lm.build_all(place + "/town", out_dir=place + "/sets", progress="none", check=0)
    words = {words} + [place + "/sets", "--out", place + "/run", "--epochs", "1", "--channels", "2", "--device", "cpu", "--quiet"]
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


def loaded(*words: str, more: str = "") -> str:
    "Code for `children.server`: a command of leakmel on tiny sets has been run once; `more` is imported before."
    return more + _IMPORTS.format(words=list(words))


def at_a_moment(imports: str, owners: str, number: int, at: int) -> str:
    "Code for a child: signal `number` comes at the call `at`, counted from 1, of what `owners` names; 0: none comes, and the calls are told."
    return _AT_A_MOMENT.format(imports=imports, owners=owners, number=int(number), at=at)


def n_moments(out: str) -> int:
    "How many calls a child told of."
    return int(out.split("moments")[1])
