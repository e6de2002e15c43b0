"Provenance: a model stores digests of its training recordings, and evaluation and prediction report recordings among them."

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from champions import load_champion
from each import each
from errors import raises

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, LeakmelError
from leakmel.detector.data.segments import Segments
from leakmel.detector.data.splits import LeakySplitWarning, group_split
from leakmel.detector.model.card import MARKS, Overlap, Provenance, find_overlap, provenance_of
from leakmel.detector.model.detector import Detector, load_detector
from leakmel.detector.model.files import load_plain, plain_bytes, round_folder
from leakmel.detector.model.settings import CheckpointSettings
from leakmel.extras import retrain as rounds
from leakmel.extras.retrain import RoundRules
from leakmel.recordings.demo import write_wav

NAMES = [f"{part}_DATASET.H5" for part in ("TRAINING", "VALIDATION", "TESTING")]
TINY = lm.TrainSettings(detector="cnn", epochs=1, epoch_share=1.0, batch_size=200, channels=(4, 8))
HOW: dict[str, Any] = {
    "settings": TINY,
    "device": "cpu",
    "progress": False,
    "checkpoints": CheckpointSettings(fsync=False),
}

pytestmark = [pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def trained(small_sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    "The folder of a training with the split as it came."
    out = tmp_path_factory.mktemp("seen") / "run"
    lm.train(small_sets / NAMES[0], small_sets / NAMES[1], out=out, **HOW)
    return out


def judged(model: Any, *names: Path, **how: Any) -> lm.Evaluation:
    return lm.evaluate(model, list(names), device="cpu", progress="none", n_draws=100, **how)


def recordings(*paths: Path) -> Segments:
    return Segments(paths, level="recording")


def known(seen: Provenance, ds: Segments) -> Overlap:
    found = find_overlap(seen, ds)
    assert found is not None
    return found


def warned(model: Any, *names: Path, **how: Any) -> tuple[lm.Evaluation, list[str]]:
    with warnings.catch_warnings(record=True) as came:
        warnings.simplefilter("always")
        found = judged(model, *names, **how)
    return found, [str(w.message) for w in came if issubclass(w.category, LeakySplitWarning)]


def test_model_stores_training_and_validation_digests(small_sets, trained):
    seen = load_detector(trained / "model.pt").provenance
    with (
        recordings(small_sets / NAMES[0], small_sets / NAMES[1]) as both,
        recordings(small_sets / NAMES[2]) as others,
    ):
        right = {d for ds in both.sources for d in ds.files["digest"]}
        assert len(seen.recordings) == len(right)
        assert seen.is_complete
        assert known(seen, both).n_in_training == len(both.rows)
        assert known(seen, others).n_in_training == 0
    best = load_detector(trained / "checkpoints" / "best.pt").provenance
    assert np.array_equal(best.recordings, seen.recordings)


def test_provenance_takes_eight_bytes_per_mark_and_some_marks_per_recording(trained):
    with_it = load_detector(trained / "model.pt")
    seen, n = with_it.provenance, 40_000
    small, large = (
        replace(with_it, provenance=s)
        .save(trained.parent / f"{len(s.recordings)}.pt", sync=False)
        .stat()
        .st_size
        for s in (seen, Provenance(np.arange(n), True))
    )
    marks = sum(len(getattr(seen, name)) for name in MARKS)
    assert abs(large - small - 8 * (n - marks)) < 1000
    assert marks < 20 * len(seen.recordings)


def test_unknown_recordings_give_no_warning(small_sets, trained):
    found, output = warned(trained / "model.pt", small_sets / NAMES[2])
    assert not found.leaky
    assert not output
    assert not any("was not checked" in c for c in found.cautions), "the model knows"


@pytest.mark.slow
@pytest.mark.filterwarnings("always")
def test_evaluation_on_a_regrouped_training_split_is_reported(small_sets, tmp_path, capsys):
    "The folder was divided anew before the training; whoever judges names the folder, and the part in it that is called testing."
    assert (
        main(
            [
                "train",
                str(small_sets),
                "--out",
                str(tmp_path / "run"),
                "--group",
                "sensor",
                "--detector",
                "cnn",
                "--epochs",
                "1",
                "--channels",
                "4,8",
                "--no-evaluation",
                "--device",
                "cpu",
                "--quiet",
            ]
        )
        == 0
    )
    with recordings(small_sets / NAMES[2]) as testing:
        found = known(load_detector(tmp_path / "run" / "model.pt").provenance, testing)
    assert 0 < found.n_in_training <= found.n
    capsys.readouterr()
    assert (
        main(
            [
                "evaluate",
                str(small_sets),
                "--model",
                str(tmp_path / "run"),
                "--device",
                "cpu",
                "--draws",
                "100",
                "--json",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    body = json.loads(printed.out)
    assert body["leaky_split"] is True
    assert any(f"{found.n_in_training:,} of {found.n:,} test recordings" in s for s in body["stamps"])
    assert "LEAKY SPLIT" not in printed.err, "the answer says it, once"
    assert (
        main(
            [
                "evaluate",
                str(small_sets),
                "--model",
                str(tmp_path / "run"),
                "--device",
                "cpu",
                "--draws",
                "100",
                "--allow-leaky-split",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert printed.out.count("LEAKY SPLIT") == 1
    assert printed.out.startswith("LEAKY SPLIT")
    assert "warning: " not in printed.err


@pytest.mark.slow
def test_the_test_part_of_the_same_split_gives_no_warning(small_sets, tmp_path):
    files = [small_sets / n for n in NAMES]
    split = group_split(files, "sensor", allow_leaky_split=True)
    done = lm.train(files, split=split, out=tmp_path / "run", **HOW)
    found, output = warned(done.detector, *files, split=split)
    assert not [s for s in (*found.stamps, *output) if "trained on" in s]


def test_validation_recordings_are_reported(small_sets, trained):
    found, output = warned(trained / "model.pt", small_sets / NAMES[1], small_sets / NAMES[2])
    with recordings(small_sets / NAMES[1]) as one, recordings(small_sets / NAMES[2]) as other:
        n, n_all = len(one.rows), len(one.rows) + len(other.rows)
    assert found.stamps == tuple(output)
    assert f"{n} of {n_all} test recordings" in output[0]
    assert "LEAKY SPLIT" in found.report()
    assert "LEAKY SPLIT" in found._repr_html_()


def test_copies_under_other_names_are_known(small_sets, trained, tmp_path):
    (tmp_path / "wavs" / "LEAK").mkdir(parents=True)
    for k, wav in enumerate(sorted((small_sets.parent / "demo" / "TRAINING" / "LEAK").glob("*.wav"))[:3]):
        os.link(wav, tmp_path / "wavs" / "LEAK" / f"copy{k}.wav")
    lm.build(tmp_path / "wavs", out=tmp_path / "copies.h5", progress="none", check=0)
    found, output = warned(trained / "model.pt", tmp_path / "copies.h5")
    assert "3 of 3 test recordings" in found.stamps[0]
    assert output


def test_predictions_of_known_recordings_are_marked(small_sets, trained, tmp_path, capsys):
    "Read in one go or one by one, under whatever name: the score of such a recording says nothing of others."
    demo = small_sets.parent / "demo"
    (tmp_path / "in").mkdir()
    for part in ("TRAINING", "VALIDATION", "TESTING"):
        for wav in sorted((demo / part).rglob("*.wav")):
            os.link(wav, tmp_path / "in" / f"{part}-{wav.parent.name}-{wav.name}")
    first = next((tmp_path / "in").glob("TRAINING-*.wav"))
    rec = lm.read_wav(first)
    write_wav(
        tmp_path / "in" / "TESTING-other.wav", np.column_stack([rec.samples[:, 0]] * 2), rec.sample_rate
    )  # other samples: it has two channels
    done = lm.predict(tmp_path / "in", trained, device="cpu", progress="none", out=tmp_path / "scores.csv")
    table = done.table
    assert table["in_training"].tolist() == [not p.startswith("TESTING") for p in table["path"]]
    n = int(table["in_training"].sum())
    assert done.summary["in_training"] == n > 10
    assert f"{n} of the recordings were used to train the detector" in done.text()
    whole = lm.predict(demo / "TESTING", trained / "model.pt", device="cpu", progress="none")
    assert whole.summary["in_training"] == 0
    assert "used to train the detector" not in whole.text()


def test_recordings_of_two_channels_are_known_too(trained, tmp_path):
    "Such recordings are read one by one, and by another way in builds."
    rng = np.random.default_rng(0)
    for k, label in enumerate(["LEAK", "LEAK", "NOLEAK", "NOLEAK"]):
        (tmp_path / "wavs" / label).mkdir(parents=True, exist_ok=True)
        write_wav(
            tmp_path / "wavs" / label / f"{k}.wav", rng.integers(-9000, 9000, (40_960, 2)).astype(np.int16)
        )
    lm.build(tmp_path / "wavs", out=tmp_path / "two.h5", progress="none", check=0)
    done = lm.train(tmp_path / "two.h5", out=tmp_path / "run", **HOW)
    assert (
        lm.predict(tmp_path / "wavs", done.detector, device="cpu", progress="none").table["in_training"].all()
    )


def test_model_without_provenance_marks_no_recording(small_sets, trained, tmp_path):
    old = replace(load_detector(trained / "model.pt"), provenance=Provenance())
    done = lm.predict(
        small_sets.parent / "demo" / "TRAINING",
        old,
        device="cpu",
        progress="none",
        out=tmp_path / "scores.csv",
    )
    assert done.table["in_training"].isna().all()
    assert done.summary["in_training"] is None
    assert "was not checked, because its file does not list them: train it again" in " ".join(
        done.text().split()
    )
    column = (tmp_path / "scores.csv").read_text().splitlines()[0].split(",").index("in_training")
    assert {line.split(",")[column] for line in (tmp_path / "scores.csv").read_text().splitlines()[1:]} == {
        ""
    }
    assert (
        "does not store"
        not in lm.predict(
            small_sets.parent / "demo" / "TESTING", trained, device="cpu", progress="none"
        ).text()
    )


def built(folder: Path, recordings: dict[str, np.ndarray]) -> Path:
    "A data set of recordings by name, leaks and others in turn."
    for k, (name, x) in enumerate(recordings.items()):
        path = folder / ("LEAK", "NOLEAK")[k % 2] / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_wav(path, x)
    return lm.build(folder, out=folder.with_suffix(".h5"), progress="none", check=0).path


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9000, 9000, 40_960).astype(np.int16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_silent_recordings_are_not_matched(tmp_path):
    "Silent recordings are alike: one in the training says nothing of another."
    quiet = np.zeros(40_960, np.int16)
    first = built(
        tmp_path / "first",
        {
            "A1~1~20240101_000000~8": noise(1),
            "A1~2~20240101_000010~8": noise(2),
            "A1~3~20240101_000020~8": quiet,
        },
    )
    second = built(
        tmp_path / "second",
        {
            "B1~1~20240101_000000~8": noise(3),
            "B1~2~20240101_000010~8": noise(4),
            "B1~3~20240101_000020~8": quiet,
        },
    )
    done = lm.train(first, out=tmp_path / "run", **HOW)
    assert len(done.detector.provenance.recordings) == 2
    found, output = warned(done.detector, second)
    assert not found.leaky
    assert not output
    assert (
        lm.predict(tmp_path / "second", done.detector, device="cpu", progress="none").summary["in_training"]
        == 0
    )
    whole = judged(done.detector, second, training=[first])
    assert not [c for c in whole.cautions if "given as training were not used" in c], (
        "the silent one is no stranger"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_foreign_training_set_is_reported(small_sets, trained, tmp_path):
    "What lies beside the recordings that judge need not be what the detector learned from."
    theirs = build_network(tmp_path, 7)
    found = judged(trained, theirs[2], training=[theirs[0]])
    with recordings(theirs[0]) as ds:
        n = len(ds.rows)
    assert [
        c for c in found.cautions if c.startswith(f"{n} of {n} recordings given as training were not used")
    ]
    own = judged(trained, small_sets / NAMES[2], training=[small_sets / NAMES[0]])
    assert not [c for c in own.cautions if "given as training were not used" in c]


WRONG: dict[str, Any] = {
    "a text": "all",
    "a list": [1, 2],
    "nothing in it": {},
    "texts": {"recordings": ["a"]},
    "no tensors": {"recordings": None},
}


@each("name", WRONG)
def test_hostile_provenance_is_refused(trained, tmp_path, name):
    values = load_plain(trained / "model.pt")
    wrong = WRONG[name]
    values["seen"] = wrong if not isinstance(wrong, dict) or not wrong else values["seen"] | wrong
    (tmp_path / "model.pt").write_bytes(plain_bytes(values))
    with raises("not-a-detector", DataError, path=tmp_path / "model.pt"):
        load_detector(tmp_path / "model.pt")


def test_a_model_that_also_has_names_of_recordings_is_read(trained, tmp_path):
    "Models of before names were dropped."
    values = load_plain(trained / "model.pt")
    values["seen"] |= {"names": torch.arange(3)}
    (tmp_path / "model.pt").write_bytes(plain_bytes(values))
    seen = load_detector(tmp_path / "model.pt").provenance
    new = load_detector(trained / "model.pt").provenance
    assert all(np.array_equal(getattr(seen, name), getattr(new, name)) for name in MARKS)


def build_network(folder: Path, seed: int) -> list[Path]:
    lm.write_demo(folder / f"{seed}", n_files=60, seed=seed)
    return [
        r.path
        for r in lm.build_all(folder / f"{seed}", out_dir=folder / f"{seed} sets", progress="none", check=0)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_rounds_store_and_check_provenance(small_sets, trained, tmp_path):
    "A challenger knows what its champion knew; a champion that knows what judges is said to, round after round."
    new, test = (build_network(tmp_path, seed)[k] for seed, k in ((5, 0), (6, 2)))
    given: dict[str, Any] = {
        "replay": small_sets / NAMES[0],
        "out": tmp_path / "rounds",
        "settings": {"epochs": 1},
        "rules": RoundRules(n_draws=100),
        "device": "cpu",
        "progress": False,
        "checkpoints": CheckpointSettings(fsync=False),
    }
    done = lm.retrain(trained, new, testing=test, **given)
    assert not [s for s in done.record["stamps"] if "trained on" in s]
    before, after = (
        load_detector(trained / "model.pt").provenance,
        load_detector(round_folder(tmp_path / "rounds", 1) / "model.pt").provenance,
    )
    with recordings(new) as ds:
        learned = provenance_of([ds]).recordings
    assert set(before.recordings) < set(after.recordings)
    assert set(after.recordings) & set(learned)
    assert set(after.recordings) <= set(before.recordings) | set(learned)
    assert after.is_complete
    assert load_champion(tmp_path / "rounds").provenance.is_complete
    # a changed copy is not the file that it came from
    champion = load_detector(trained / "model.pt")
    assert champion.path == str(trained / "model.pt")
    assert replace(champion, vote="mean").path == "a detector in memory"
    assert done.challenger.path == str(round_folder(tmp_path / "rounds", 1) / "model.pt")
    chosen_by = lm.retrain(
        trained, new, testing=small_sets / NAMES[1], **given | {"out": tmp_path / "others"}
    )
    with recordings(small_sets / NAMES[1]) as ds:
        n = len(ds.rows)
    assert [
        s
        for s in chosen_by.record["stamps"]
        if s.startswith("LEAKY SPLIT") and f"testing: {n} of {n} test recordings" in s
    ]
    assert "BEWARE" in repr(chosen_by)
    assert any("selected in retraining rounds" in c for c in judged(done.challenger, test).cautions)
    assert not any("selected in retraining rounds" in c for c in judged(trained, test).cautions)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_interrupted_round_keeps_its_provenance(small_sets, trained, tmp_path, monkeypatch):
    "Its model and its best one so far were begun from the champion."
    new, test = (build_network(tmp_path, seed)[k] for seed, k in ((5, 0), (6, 2)))

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rounds, "conclude", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.retrain(
            trained,
            new,
            testing=test,
            replay=small_sets / NAMES[0],
            out=tmp_path / "rounds",
            settings={"epochs": 1},
            device="cpu",
            progress=False,
            rules=RoundRules(n_draws=100, replay_share=0.2),
            checkpoints=CheckpointSettings(fsync=False),
        )
    before, here = load_detector(trained / "model.pt").provenance, round_folder(tmp_path / "rounds", 1)
    for path in (here / "model.pt", here / "checkpoints" / "best.pt"):
        seen = load_detector(path).provenance
        assert set(before.recordings) < set(seen.recordings)


@pytest.mark.filterwarnings("ignore::leakmel.detector.data.splits.SplitWarning")
def test_a_refused_call_leaves_no_folder(small_sets, trained, tmp_path):
    for champion, how, output in (
        (tmp_path / "nowhere.pt", {}, "does not exist"),
        (trained, {"device": "cuda:99"}, "no such"),
    ):
        with pytest.raises(LeakmelError, match=output):
            lm.retrain(
                champion,
                small_sets / NAMES[0],
                replay=small_sets / NAMES[0],
                testing=small_sets / NAMES[2],
                out=tmp_path / "rounds",
                progress=False,
                **cast(dict[str, Any], {"device": "cpu"} | how),
            )
        assert not list((tmp_path / "rounds").glob("*"))


def hiss(seed: int, seconds: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1000, int(4096 * seconds))


def data_set(folder: Path, samples: dict[str, np.ndarray]) -> Path:
    "A data set of recordings of 4,096 Hz: name -> samples."
    for k, (name, x) in enumerate(samples.items()):
        (folder / ("LEAK" if k % 2 else "NOISE")).mkdir(parents=True, exist_ok=True)
        write_wav(folder / ("LEAK" if k % 2 else "NOISE") / f"{name}.wav", x.astype(np.int16), 4096)
    return lm.build(folder, out=folder.parent / f"{folder.name}.H5", progress="none", check=0).path


def test_recordings_that_share_audio_are_known_both_ways(tmp_path):
    "Clips of ten recordings, one of them padded, and the recordings themselves; two others are new."
    whole = {f"r{k}": hiss(k, 30) for k in range(12)}
    clips = {f"c{k}x{at}": whole[f"r{k}"][4096 * at :][: 4096 * 10] for k in range(10) for at in (0, 7, 15)}
    clips["c0x7"] = np.concatenate([clips["c0x7"][:20480], np.zeros(20480)])
    sets = data_set(tmp_path / "clips", clips), data_set(tmp_path / "whole", whole)
    with recordings(sets[0]) as cut, recordings(sets[1]) as of:
        found, back = known(provenance_of([cut]), of), known(provenance_of([of]), cut)
        assert (found.n_in_training, found.n_sharing, found.n_new, found.n_named) == (0, 10, 12, 0)
        assert back.n_sharing > 24, "of 30: those that begin after the end of a row are not in it"
        assert f"{found.n_sharing} of 12 test recordings share audio" in found.stamp
        assert len(provenance_of([of]).segments) < len(of.rows) * of.row_shape[0] / 4
        both = provenance_of([cut]) | provenance_of([of])
        assert known(both, cut).n_sharing == 0, "they are in the training themselves"
        assert "share audio" not in known(both, cut).text


def test_silence_and_what_recordings_have_in_common_is_no_shared_audio(tmp_path):
    beep = 8000 * np.sin(2 * np.pi * 440.3 * np.arange(8192) / 4096)
    time = np.arange(40960) / 4096
    for name, make in {
        "silence": lambda k: np.zeros(40960),
        "constant": lambda k: np.full(40960, k + 1),
        "tone": lambda k: (8000 + k) * np.sin(2 * np.pi * 400 * time),
        "beep first": lambda k: np.concatenate([beep, hiss(k, 8)]),
        "noise of one step": lambda k: np.sign(hiss(k, 10)),
        "halves": lambda k: hiss(k % 6, 20)[(k // 6) * 40960 :][:40960],
    }.items():
        of = [data_set(tmp_path / f"{name}{k}", {f"n{i}x": make(i) for i in range(k, k + 6)}) for k in (0, 6)]
        with recordings(of[0]) as one, recordings(of[1]) as other:
            found = known(provenance_of([one]), other)
        assert (found.n_in_training, found.n_sharing, found.text) == (0, 0, ""), name


def test_names_that_continue_others_are_a_question(tmp_path):
    for names, others, n in (
        (["pipe7_000", "pipe7_010", "pipe8_000", "pipe8 (2)"], ["pipe7", "PIPE8", "pipe9"], 2),
        (["pipe7", "pipe8"], ["pipe7_1_t05", "pipe8-2", "pipe9-1", "pipe"], 2),
        (["a_part1", "a_part2"], ["a_part3", "b_part1"], 1),
        (["a_1", "a_2", "001"], ["a_3", "002", "a_1b"], 0),
    ):
        sets = [
            data_set(tmp_path / f"{names[0]}{side}", {name: hiss(side + k, 2) for k, name in enumerate(own)})
            for side, own in ((10, names), (20, others))
        ]
        with recordings(sets[0]) as one, recordings(sets[1]) as other:
            found = known(provenance_of([one]), other)
        assert (found.n_named, found.stamp, bool(found.question)) == (n, "", n > 0), names


def test_evaluation_on_the_recordings_of_the_clips_is_leaky(tmp_path):
    whole = {f"r{k}": hiss(k, 20) * (1 + k % 2) for k in range(8)}
    clips = {f"{name}_{at}": x[4096 * at :][: 4096 * 5] for name, x in whole.items() for at in (0, 9)}
    learned = data_set(tmp_path / "clips", dict(sorted(clips.items(), key=lambda c: c[0][-1])))
    done = lm.train(learned, out=tmp_path / "run", progress=False)
    found, output = warned(done.detector, data_set(tmp_path / "whole", whole))
    assert found.leaky
    assert "8 of 8 test recordings share audio with training recordings" in output[0]
    stranger = replace(done.detector, provenance=Provenance(is_complete=True))
    shifted = {f"x{name}": x[4096 * 2 :][: 4096 * 5] for name, x in whole.items()}
    given = {"training": data_set(tmp_path / "shifted", shifted), "allow_leaky_split": True}
    (stamp,) = warned(stranger, learned, **given)[0].stamps
    assert "of 16 test recordings share audio" in stamp
    question = "test recordings have names that continue names of training recordings"
    other = data_set(tmp_path / "other", {f"r{k}": hiss(k + 50, 20) for k in range(8)})
    assert question in " ".join(warned(done.detector, other)[0].cautions)


def test_files_of_the_earlier_system_have_no_provenance(tmp_path):
    from made_detectors import earlier_system

    ds = earlier_system(tmp_path / "old.h5", 4, 0)
    assert find_overlap(Provenance(is_complete=True), ds) is None
    assert not provenance_of([ds]).is_complete
    ds.close()


def test_detector_in_memory_reports_known_recordings(small_sets, trained):
    found, output = warned(load_detector(trained / "model.pt"), small_sets / NAMES[0])
    assert found.leaky
    assert len(output) == 1
    assert isinstance(load_detector(trained / "model.pt"), Detector)
