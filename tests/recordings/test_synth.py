"The demo set: equal bytes for equal seeds, complete accounting, never incomplete, and not trivial to classify."

import errno
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from each import each
from errors import raises

from leakmel.core.errors import LeakmelError, OutputError, SpaceError, UsageError
from leakmel.recordings import demo as synth
from leakmel.recordings.demo import (
    LABELS,
    MIN_FILES,
    N_SAMPLES,
    N_SENSORS,
    SAMPLE_RATE,
    SPLIT_SIZES,
    WAV_BYTES,
    make_recording,
    make_sensor,
    plan_set,
    split_counts,
    split_sensors,
    stream,
    write_demo,
    write_wav,
)


def contents(root: Path) -> dict[str, bytes]:
    "Every file below a folder, by relative path."
    return {
        os.path.relpath(os.path.join(d, f), root): Path(d, f).read_bytes()
        for d, _, files in os.walk(root)
        for f in files
    }


# -- the same bytes ---------------------------------------------------------------------------------------------------


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        write_demo(tmp_path / name, n_files=101, seed=7, faults=True)
    first = contents(tmp_path / "a")
    assert len(first) == 116
    assert first == contents(tmp_path / "b")


def test_faults_change_no_good_recording(tmp_path: Path) -> None:
    write_demo(tmp_path / "good", n_files=40)
    summary = write_demo(tmp_path / "faulty", n_files=40, faults=True)
    faulty = contents(tmp_path / "faulty")
    for path, _ in summary.faults:
        del faulty[path]
    assert faulty == contents(tmp_path / "good")


def test_no_two_recordings_share_content(tmp_path: Path) -> None:
    write_demo(tmp_path / "a", n_files=200)
    write_demo(tmp_path / "b", n_files=20, seed=1)
    bodies = [b[44:] for b in contents(tmp_path / "a").values()] + [
        b[44:] for b in contents(tmp_path / "b").values()
    ]
    assert len(set(bodies)) == 220
    x = np.stack([np.frombuffer(b, "<i2").astype(np.float64) for b in bodies[:24]])
    spectra = np.fft.rfft(x)[
        :, 3100:
    ]  # above the pumps' lines; phases only, so that a likeness at any shift in time shows as a peak
    phases = spectra / np.abs(spectra)
    likeness = max(
        np.abs(np.fft.ifft(phases[i] * phases[j].conj())).max() for i in range(24) for j in range(i)
    )
    assert likeness < 0.1, "1 for a copy, a few hundredths for recordings that have nothing in common"


def test_a_recording_depends_on_seed_and_index_only() -> None:
    small, large = plan_set(60, 3), plan_set(600, 3)
    assert np.array_equal(synth.render_planned(small[5], 3)[1], synth.render_planned(small[5], 3)[1])
    assert repr(small[5].sensor) == repr(large[5].sensor) == repr(make_sensor(2, 3))
    assert synth.render_planned(small[5], 3)[0] == synth.render_planned(large[5], 3)[0]


# -- layout and accounting ------------------------------------------------------------------------------------------


@pytest.mark.slow
@each("faults", [False, True])
@each("n_files", [6, 7, 26, 150])
def test_every_file_is_accounted_for(tmp_path: Path, n_files: int, faults: bool) -> None:
    seen: list[int] = []
    summary = write_demo(tmp_path / "new" / "demo", n_files=n_files, faults=faults, progress=seen.append)
    files = contents(summary.root)
    assert summary.n_files == len(files) == n_files + 15 * faults == n_files + len(summary.faults)
    assert summary.n_bytes == sum(map(len, files.values()))
    walked = Counter((p.split("/")[0], p.split("/")[1] if p.count("/") == 2 else "") for p in files)
    assert {
        (s, label): n for s, by_label in summary.splits.items() for label, n in by_label.items()
    } == walked
    assert all(summary.splits[s][label] >= 1 for s in SPLIT_SIZES for label in LABELS)
    assert seen == sorted(seen)
    assert seen[-1] == n_files
    assert "\n" not in repr(summary)
    assert f"{summary.n_files:,} files" in repr(summary)
    assert os.listdir(tmp_path / "new") == ["demo"]


def test_names_and_bytes_are_those_of_a_logger(tmp_path: Path) -> None:
    write_demo(tmp_path / "demo", n_files=120)
    recordings: set[str] = set()
    stamps: Counter[tuple[str, str]] = Counter()
    for path, body in contents(tmp_path / "demo").items():
        split, label, name = path.split("/")
        sensor, recording, stamp, gain = name.removesuffix(".wav").split("~")
        assert split in SPLIT_SIZES
        assert label in LABELS
        assert int(gain) > 1
        assert len(stamp) == 15
        recordings.add(recording)
        stamps[sensor, stamp[:13]] += 1
        assert len(body) == WAV_BYTES == 81_964
    assert len(recordings) == 120
    assert set(stamps.values()) == {1}, "a sensor cannot record twice in one minute"


def test_soundfile_reads_the_same_samples(tmp_path: Path) -> None:
    x = make_recording(make_sensor(0), "LEAK", stream(0, 1, 0))
    for samples, rate in ((x, SAMPLE_RATE), (np.stack([x, x[::-1]], axis=1), 8000)):
        assert write_wav(tmp_path / "a.wav", samples, rate) == os.path.getsize(tmp_path / "a.wav")
        back, read_rate = soundfile.read(tmp_path / "a.wav", dtype="int16")
        assert read_rate == rate
        assert np.array_equal(back, samples)
        assert soundfile.info(tmp_path / "a.wav").subtype == "PCM_16"


def test_samples_of_another_type_are_refused(tmp_path: Path) -> None:
    for bad in (np.zeros(4), np.zeros(4, np.int32), np.zeros((2, 2, 2), np.int16)):
        with raises("wrong-type", UsageError, says="int16"):
            write_wav(tmp_path / "a.wav", bad)
    assert not (tmp_path / "a.wav").exists()


def test_reference_size_and_disjoint_sensors() -> None:
    assert split_counts(51_434) == {"TRAINING": 39_563, "VALIDATION": 7_913, "TESTING": 3_958}
    plan = plan_set(51_434)
    assert len({p.path(8) for p in plan}) == 51_434
    by_sensor = Counter((p.sensor.name, p.split, p.label) for p in plan)
    assert (
        len({name for name, _, _ in by_sensor}) == len({(name, split) for name, split, _ in by_sensor}) == 400
    )
    assert all(
        abs(by_sensor[name, split, "LEAK"] - by_sensor[name, split, "NOLEAK"]) <= 1
        for name, split, _ in by_sensor
    )


@each(
    ("n_files", "numbers"),
    [
        (6, (24, 6, 10)),
        (1200, (24, 6, 10)),
        (1230, (25, 6, 10)),
        (6000, (120, 30, 50)),
        (51_434, (240, 60, 100)),
    ],
)
def test_a_larger_set_has_more_sensors(n_files: int, numbers: tuple[int, ...]) -> None:
    parts = split_sensors(n_files)
    assert tuple(map(len, parts.values())) == numbers
    everywhere = [i for part in parts.values() for i in part]
    assert everywhere == list(range(len(everywhere)))


# -- neither trivial nor hopeless ---------------------------------------------------------------------------------


def band_levels(x: np.ndarray) -> np.ndarray:
    "Power in 32 bands of every 512 samples of a recording [80, 32]."
    edges = np.unique(np.round(np.geomspace(1, 257, 33)).astype(int))
    spectra = np.abs(np.fft.rfft(x.reshape(-1, 512) / 32768 * np.hanning(512))) ** 2
    return np.add.reduceat(spectra, edges[:-1], axis=1) + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.long) for k in (1, 4))])
def test_simple_classifiers_are_neither_blind_nor_perfect_on_new_sensors(seed: int) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import GroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features: dict[str, list[np.ndarray]] = {
        "level": [],
        "mean spectrum": [],
        "mean log spectrum": [],
        "quiet tenth": [],
    }
    y = np.arange(600) % 2
    sensor = np.arange(600) // 2 % N_SENSORS
    for i in range(600):
        x = make_recording(make_sensor(int(sensor[i]), seed), LABELS[1 - y[i]], stream(seed, 1, i))
        bands = band_levels(x)
        features["level"].append(np.array([20 * np.log10(x.std())]))
        features["mean spectrum"].append(np.log10(bands.mean(0)))
        features["mean log spectrum"].append(np.log10(bands).mean(0))
        features["quiet tenth"].append(np.log10(np.percentile(bands, 10, axis=0)))
    auc = {}
    for name, rows in features.items():
        model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=3000))
        p = cross_val_predict(
            model, np.array(rows), y, groups=sensor, cv=GroupKFold(6), method="predict_proba"
        )[:, 1]
        accuracy, auc[name] = float(np.mean((p > 0.5) == y)), float(roc_auc_score(y, p))
        assert 0.55 < accuracy < 0.99, f"{name}: accuracy {accuracy:.3f}"
        assert 0.60 < auc[name] < 0.99, f"{name}: AUC {auc[name]:.3f}"
    assert auc["level"] < auc["mean spectrum"] < auc["quiet tenth"], (
        "colour tells more than loudness, and time more than both"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 5])
def test_recordings_are_loud_enough_and_seldom_clip(seed: int) -> None:
    levels, clipped = [], 0.0
    for i in range(240):
        x = make_recording(make_sensor(i % N_SENSORS, seed), LABELS[i % 2], stream(seed, 1, i))
        assert x.shape == (N_SAMPLES,)
        levels.append(20 * np.log10(x.std() / 32768))
        clipped = max(clipped, float(np.mean((x == 32767) | (x == -32768))))
    assert min(levels) > -60
    assert max(levels) < -6
    assert np.ptp(levels) > 15
    assert clipped < 0.05


def test_sensors_differ_and_follow_the_seed() -> None:
    network = [make_sensor(i) for i in range(N_SENSORS)]
    assert repr([make_sensor(i) for i in range(N_SENSORS)]) == repr(network)
    assert repr(make_sensor(0, 1)) != repr(network[0])
    assert len({s.name for s in network}) == N_SENSORS
    colours = np.stack([10 * np.log10(s.colour[100:2000]) for s in network])
    assert colours.std(0).mean() > 2, "dB between sensors"


# -- planted faults -----------------------------------------------------------------------------------------------


def test_planted_faults_equal_the_list(tmp_path: Path) -> None:
    summary = write_demo(tmp_path / "demo", n_files=30, faults=True)
    files = contents(summary.root)
    what = {text: files[path] for path, text in summary.faults}
    where = {text: path for path, text in summary.faults}
    assert len(what) == 15
    assert what["empty file"] == b""
    assert len(what["header without samples"]) == 44
    assert what["header without samples"][40:44] == bytes(4)
    assert len(what["truncated"]) == 30_000 < int.from_bytes(what["truncated"][40:44], "little")
    assert what["git-lfs pointer"].startswith(b"version https://git-lfs.github.com/spec/v1\n")
    samples = {}
    for text in (
        "8 kHz",
        "two identical channels",
        "3 s instead of 10 s",
        "clipped",
        "silent",
        "float samples with a NaN",
    ):
        samples[text], rate = soundfile.read(summary.root / where[text])
        assert rate == (8000 if text == "8 kHz" else SAMPLE_RATE)
    assert len(samples["8 kHz"]) == 80_000
    assert np.array_equal(*samples["two identical channels"].T)
    assert len(samples["3 s instead of 10 s"]) == 3 * SAMPLE_RATE
    assert np.mean(np.abs(samples["clipped"]) > 0.999) > 0.2
    assert not samples["silent"].any()
    assert np.isnan(samples["float samples with a NaN"]).sum() == 1
    dry, loose, odd = (
        next(p for t, p in where.items() if t.startswith(s)) for s in ("gain 1", "directly", "name with")
    )
    assert dry.endswith("~1.wav")
    assert loose.count("/") == 1
    assert " " in odd
    assert not odd.isascii()
    copies = [(p, t.split(" as ")[1].split(",")[0]) for t, p in where.items() if t.startswith("same content")]
    assert [p.split("/")[0] for p, _ in copies] == ["TRAINING", "TESTING"]
    assert all(files[copy] == files[original] and copy != original for copy, original in copies)
    content = Counter(files.values())
    assert sorted(content.values())[-1] == 3, "one recording lies there three times"
    assert sum(n > 1 for n in content.values()) == 1


# -- refusals, and never half a set --------------------------------------------------------------------------------


@each("n_files", [0, -1, MIN_FILES - 1, 10.0, True, "many"])
def test_too_few_files_are_refused(tmp_path: Path, n_files: object) -> None:
    with raises("wrong-value", UsageError, says=str(MIN_FILES)):
        write_demo(tmp_path / "demo", n_files=n_files)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{"seed": -1}, {"seed": 1.5}])
def test_invalid_options_are_refused(tmp_path: Path, options: dict) -> None:
    with raises("wrong-value", UsageError):
        write_demo(tmp_path / "demo", n_files=6, **options)
    assert os.listdir(tmp_path) == []


def test_a_target_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "mine.txt").write_text("keep")
    with raises("output-exists", OutputError, path=tmp_path / "demo"):
        write_demo(tmp_path / "demo", n_files=6)
    with raises("output-exists", OutputError, path=tmp_path / "demo" / "mine.txt"):
        write_demo(tmp_path / "demo" / "mine.txt", n_files=6)
    with raises("write-failed", OutputError):
        write_demo(tmp_path / "demo" / "mine.txt" / "below", n_files=6)
    assert contents(tmp_path) == {"demo/mine.txt": b"keep"}


def test_an_empty_target_and_a_link_to_one_are_filled(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert write_demo(tmp_path / "link", n_files=6).root == (tmp_path / "real").resolve()
    assert len(contents(tmp_path / "real")) == 6


def test_insufficient_space_is_reported_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"f_bavail": 6 * WAV_BYTES - 1, "f_frsize": 1})
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    with raises("no-space", SpaceError, path=tmp_path) as e:
        write_demo(tmp_path / "demo", n_files=6)
    assert e.value.exit_code == 3
    assert os.listdir(tmp_path) == []


@each(
    ("code", "kind"), [(errno.ENOSPC, SpaceError), (errno.EMFILE, OutputError), (errno.EACCES, OutputError)]
)
def test_a_failing_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[LeakmelError]
) -> None:
    real, calls = synth.write_wav, [0]

    def failing(path, *args):
        calls[0] += 1
        if calls[0] > 50:
            raise OSError(code, os.strerror(code), os.fspath(path))
        assert not (tmp_path / "demo").exists()
        return real(path, *args)

    monkeypatch.setattr(synth, "write_wav", failing)
    with pytest.raises(kind) as e:
        write_demo(tmp_path / "demo", n_files=2000)
    assert type(e.value) is kind
    assert ".wav" in str(e.value)
    assert os.listdir(tmp_path) == []
    assert calls[0] == 51, "the first error ends it"


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(n_done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_demo(tmp_path / "demo", n_files=200, progress=interrupt)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_killed_run_leaves_no_set(tmp_path: Path) -> None:
    code = (
        "import os, signal; from leakmel.recordings.demo import write_demo\n"
        f"write_demo({str(tmp_path / 'demo')!r}, n_files=2000, progress=lambda n: n > 200 and os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(synth.__file__).parents[2], timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".demo.")
    assert len(contents(write_demo(tmp_path / "demo", n_files=20).root)) == 20


def test_first_of_two_writers_wins(tmp_path: Path) -> None:
    done: list[Path] = []

    def second(n_done: int) -> None:
        if not done:
            done.append(write_demo(tmp_path / "demo", n_files=12).root)

    with raises("output-exists", OutputError):
        write_demo(tmp_path / "demo", n_files=6, progress=second)
    assert os.listdir(tmp_path) == ["demo"]
    assert len(contents(tmp_path / "demo")) == 12


def test_a_target_filled_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def fill(n_done: int) -> None:
        (tmp_path / "demo").mkdir(exist_ok=True)
        (tmp_path / "demo" / "mine.txt").write_text("keep")

    with raises("output-exists", OutputError):
        write_demo(tmp_path / "demo", n_files=6, progress=fill)
    assert contents(tmp_path) == {"demo/mine.txt": b"keep"}
