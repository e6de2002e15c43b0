"Exploring without a browser: what is chosen, refused, drawn and heard; spec files from there to a build; the notebook as papermill runs it."

import io
import json
import os
import shutil
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import nbformat
import numpy as np
import pytest
from build_runs import plan_run
from each import each
from errors import raises
from notebook_runs import PLOTLY, Run, copy_project, papermill, titles_of

import leakmel as lm
from leakmel.cli import main
from leakmel.core.errors import DataError, OutputError, SpecError, UsageError
from leakmel.core.operation import parameter_kinds
from leakmel.core.parameters import check_types
from leakmel.dataset.reader import MOST_BYTES, read_spec, requested_spec, spec_of_data_set, write_spec
from leakmel.operations.data import Build
from leakmel.pages.explore import (
    Controls,
    Explorer,
    ExploreView,
    borders,
    envelope,
    explore_kinds,
    loudest_hz,
    mel_columns,
    open_explorer,
    playback_part,
    rate_options,
    recording_figure,
    recordings_of_scan,
    sample_range,
    shows_controls,
    split_spectra,
    status_line,
)
from leakmel.pages.page_figures import as_float
from leakmel.pages.plots import recording_spectra
from leakmel.recordings.demo import wav_bytes, write_demo

ROOT = Path(__file__).resolve().parents[2]
FIXED = {"sample_rate": 4096, "duration_s": 10.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("explore") / "demo"
    write_demo(root, n_files=60, faults=True)
    return root


@pytest.fixture(scope="module")
def recordings(data):
    return recordings_of_scan(lm.scan(data, content=True, progress="none"))


@pytest.fixture
def state(recordings):
    return Explorer(recordings)


@pytest.fixture(scope="module")
def built(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("built") / "TRAINING_DATASET.H5"
    lm.build(
        data,
        split="training",
        out=path,
        spec={"preset": "overlap", "n_mels": 24, **FIXED},
        engine="cpu",
        progress="none",
    )
    return path


# ---- which recordings ----------------------------------------------------------------------------------------------


def test_recordings_are_found_by_filter(recordings):
    for choice, n in (
        ({}, len(recordings.table)),
        ({"flag": "clipped"}, 1),
        ({"split": "TRAINING", "flag": "silent"}, 1),
    ):
        assert len(recordings.matching(choice)) == n
    table = recordings.table
    without_columns = replace(recordings, table=table[["path"]])
    assert len(without_columns.matching({})) == len(table)  # no filter reads no column
    assert set(table["label"].iloc[recordings.matching({"label": "LEAK"})]) == {"LEAK"}
    assert "6 others cannot be used" in repr(recordings)  # five that cannot be read, one without a label
    assert {
        "clipped",
        "silent",
        "dc_offset",
        "stereo",
        "identical_channels",
        "other_length",
        "duplicate",
    } <= set(recordings.value_counts["flag"])
    for name, word in (("label", "LEEK"), ("flag", "loud"), ("split", "training")):
        with pytest.raises(UsageError, match=f"has this {name}; found {word!r}; expected [^;]*$"):
            recordings.matching({name: word})


def test_a_filter_that_matches_nothing_changes_nothing(state):
    state.filter_recordings(flag="silent")
    row, before = state.row, dict(state.filter)
    for name, word in (("label", "NOLEAK"), ("sensor", "none")):
        with raises("no-matching-recording", UsageError):
            state.filter_recordings(**{name: word})
        assert (state.filter, state.row) == (before, row)
    state.filter_recordings(flag="", label="NOLEAK")


def test_next_wraps_around_and_filter_keeps_the_recording(state):
    state.go_to(-1)
    assert state.position == len(state.matching) - 1
    row = state.row
    state.go_to(state.position + 1)
    assert state.position == 0
    state.go_to(len(state.matching) - 1)
    state.filter_recordings(label=state.facts["label"])
    assert state.row == row


# ---- settings ------------------------------------------------------------------------------------------------------


def test_mels_are_those_of_log_mel_and_of_a_build(state, built):
    state.change_spec(preset="overlap", n_mels=24)
    with lm.open_dataset(built) as ds:
        for row in (0, 7, len(ds) - 1):
            shown = "TRAINING/" + ds.files["path"][row]
            state.go_to(int(np.flatnonzero(state.recordings.table["shown"].iloc[state.matching] == shown)[0]))
            samples, status, mels = state.read()
            assert np.array_equal(mels, ds[row][0])
            assert status == ds.files["status"][row]
    assert np.array_equal(mels, lm.log_mel(samples, state.spec, engine="cpu").astype(np.float16))


def test_refused_setting_changes_nothing_and_has_a_remedy(state):
    before = state.read()[2]
    for change, output in (
        ({"n_mels": 256}, "Use n_mels=239 or fewer"),
        ({"n_fft": 1024}, "Lower n_fft"),
        ({"f_min_hz": 2000.0, "f_max_hz": 1000.0}, "Change f_min_hz"),
        ({"preset": "magic"}, "no preset has this name"),
        ({"num_mels": 3}, "no setting num_mels"),
    ):
        with pytest.raises(lm.LeakmelError, match=output):
            state.change_spec(**change)
        assert (state.spec, state.changes) == (
            lm.MelSpec.preset("disjoint", **FIXED),
            {"preset": "disjoint@2"},
        )
        assert np.array_equal(state.read()[2], before)


def test_changes_list_differences_from_the_preset(state):
    state.change_spec(n_fft=256, n_mels=20, power=1.0, f_max_hz=None)
    assert state.changes == {"preset": "disjoint@2", "n_fft": 256, "n_mels": 20}
    state.change_spec(n_fft=512)
    assert state.changes == {"preset": "disjoint@2", "n_mels": 20}
    state.change_spec(preset="overlap")
    assert state.changes == {"preset": "overlap@2"}


# ---- pictures and sound --------------------------------------------------------------------------------------------


def test_frames_of_selected_segments_are_unique_and_ordered():
    spec = lm.MelSpec.preset("overlap", hop_length=64, n_fft=256)
    n_long, _n_short, _, _n_frames = spec.row_shape
    mels = (
        spec.grid.frame_starts[:, :, None, :].repeat(spec.n_mels, 2).astype(np.float32)
    )  # each frame says where it begins
    for segments in (range(n_long), range(5, 9), range(5, 6), range(n_long - 1, n_long)):
        times, picture, starts = mel_columns(mels, spec, segments)
        own = {int(v) for v in spec.grid.frame_starts[segments.start : segments.stop].ravel()}
        each = -(-len(own) // len(times))
        assert starts.tolist() == sorted(own)
        if each == 1:
            assert picture[0].tolist() == sorted(own)
        assert np.allclose(times[:1], (min(own) + 128 + 64 * (each // 2)) / 4096)
        assert len(times) == -(-len(own) // each) <= 800
        start, stop = sample_range(spec, segments)
        assert (start, stop) == (min(own), max(own) + 256 + (spec.short_window - 256) % 64)


def test_borders_and_envelope():
    spec = lm.MelSpec.preset("overlap")
    long, short = borders(spec, range(2, 4))
    assert long.tolist() == [1024, 1536, 2048, 2560]
    assert short.tolist() == [1280, 1792, 2304]
    rng = np.random.default_rng(0)
    x = rng.normal(size=41_003).astype(np.float32)
    at, values = envelope(x)
    assert len(at) == len(values) <= 1900
    assert (values.min(), values.max(), at[-1] < len(x)) == (x.min(), x.max(), True)
    assert np.array_equal(envelope(x[:500])[1], x[:500])


def test_the_figure_has_units_a_finding_and_few_points(state):
    state.filter_recordings(split="TRAINING", flag="clipped")
    state.change_spec(n_fft=64, hop_length=16, n_mels=8)
    figure = recording_figure(state)
    assert "re full scale, loudest at" in figure.layout.title.text
    assert "clipped" in figure.layout.title.subtitle.text
    assert "each column is the maximum of" in figure.layout.title.subtitle.text.replace("<br>", " ")
    assert [
        a.title.text
        for a in (figure.layout.xaxis2, figure.layout.yaxis2, figure.layout.xaxis3, figure.layout.yaxis)
    ] == ["time (s)", "frequency (Hz)", "mean level (dB)", "amplitude"]
    assert max(len(t.x) for t in figure.data) <= 1900
    state.filter_recordings(split="", flag="silent")
    assert recording_figure(state).layout.title.text.endswith(": the recording is silent")
    noise = np.random.default_rng(0).normal(0, 300, 40_960)
    tone = 120 * np.sin(2 * np.pi * 200 * np.arange(40_960) / 4096)
    samples = (noise + tone).astype(np.int16)  # mel bands get wider, and louder, towards high frequencies
    assert abs(loudest_hz(samples, lm.MelSpec.preset("overlap"), np.arange(0, 40_000, 64)) - 200) <= 8


def test_playback_is_the_selected_part_and_states_its_gain(state):
    state.filter_recordings(split="TRAINING", label="NOLEAK")
    state.select(4, 8)
    (plain, output), (loud, raised) = (playback_part(state, louder) for louder in (False, True))
    for wav in (plain, loud):
        with wave.open(io.BytesIO(wav)) as f:
            assert (f.getframerate(), f.getnframes(), f.getsampwidth()) == (4096, 4096, 2)
    assert output == "1 s at 4,096 Hz, at the recorded level"
    assert "level changed by +" in raised
    as_recorded, samples = np.frombuffer(plain[44:], np.int16), state.read()[0]
    assert np.array_equal(as_recorded, np.round(as_float(samples[4096:8192]) * 32_767).astype(np.int16))
    assert abs(np.frombuffer(loud[44:], np.int16).std() / 32_768 - 0.1) < 0.01  # -20 dB re full scale


def test_the_sound_has_the_rate_of_the_recording_even_if_the_spec_rejects_it(recordings):
    changes = {"preset": "disjoint", "sample_rate": 8192, "duration_s": 10.0, "rate": "reject"}
    state = Explorer(recordings, changes)
    state.select(4, 8)
    with pytest.raises(lm.LeakmelError):
        recording_figure(state)
    wav, output = playback_part(state)
    with wave.open(io.BytesIO(wav)) as f:
        assert (f.getframerate(), f.getnframes()) == (4096, 4096)
    assert output == "1 s at 4,096 Hz, at the recorded level"


def test_windows_that_do_not_fit_are_not_offered(recordings):
    view = ExploreView(Explorer(recordings, {"preset": "overlap"}), controls=True)
    view.draw = lambda: None  # type: ignore[method-assign]
    widgets = Controls(view).widgets
    assert max(value for _, value in widgets["n_fft"].options) == view.state.spec.short_window
    widgets["long"].value = (70, 75)
    assert view.state.segments == range(70, 76)
    widgets["preset"].value = "disjoint@2"  # 40 long segments instead of 79
    assert widgets["long"].value == (39, 39)


@pytest.fixture
def controls(recordings):
    view = ExploreView(Explorer(recordings, {"preset": "overlap"}), controls=True)
    view.draw = lambda: None  # type: ignore[method-assign]
    return Controls(view)


def test_lengths_of_segments_show_ms_samples_and_hz_and_keep_the_overlap(controls):
    spec, windows = controls.state.spec, controls.widgets
    assert dict(windows["long_window"].options)["250 ms, 1,024 samples, 4 Hz"] == 1024
    assert dict(windows["short_window"].options)["62 ms, 256 samples, 16 Hz"] == 256
    assert max(value for _, value in windows["long_window"].options) == 32_768  # of 40,960 samples
    windows["long_window"].value = 4096
    windows["short_window"].value = 2048
    spec = controls.state.spec
    assert (spec.long_window, spec.long_hop, spec.short_window, spec.short_hop) == (4096, 2048, 2048, 1024)
    assert controls.widgets["long"].max == 18
    assert max(value for _, value in windows["n_fft"].options) == 2048
    assert controls.state.changes == {
        "preset": "overlap@2",
        "long_window": 4096,
        "long_hop": 2048,
        "short_window": 2048,
        "short_hop": 1024,
    }


def test_a_refused_length_stays_on_the_list_until_another_change_makes_it_valid(controls):
    before, windows = controls.state.spec, controls.widgets
    windows["short_window"].value = 2048  # the long segment has 1024 samples
    assert "short segment" in controls.view.error
    assert (controls.state.spec, windows["short_window"].value) == (before, 2048)
    windows["long_window"].value = 2048
    assert (controls.view.error, controls.state.spec.row_shape[:2]) == ("", (39, 1))
    windows["short_window"].value = 256
    assert "n_fft" in controls.view.error
    assert controls.state.spec.short_window == 2048


def test_sample_rates_are_those_of_the_folder_and_lower_common_ones(tmp_path, recordings):
    # 8,000 Hz: the demo data set has one recording of that rate
    assert rate_options(recordings, 4096) == [("4,096 Hz (68)", 4096), ("8,000 Hz (1)", 8000)]
    for name, rate, n in (("a", 4096, 1), ("b", 4096, 1), ("c", 4096, 1), ("d", 9000, 2)):
        for label in ("LEAK", "NOLEAK"):
            path = tmp_path / "demo" / label / f"2024-01-01~H{name}~{label}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(n).normal(size=2 * rate) * 3000
            path.write_bytes(wav_bytes(noise.astype(np.int16), rate))
    mixed = recordings_of_scan(lm.scan(tmp_path / "demo", content=True, progress="none"))
    state = Explorer(mixed)
    view = ExploreView(state, controls=True)
    view.draw = lambda: None  # type: ignore[method-assign]
    controls = Controls(view)
    shown = [text for text, _ in controls.widgets["sample_rate"].options]
    assert shown == ["4,096 Hz (6)", "8,000 Hz (0)", "9,000 Hz (2)"]
    controls.widgets["long_window"].value = 2048
    controls.widgets["sample_rate"].value = 8000
    assert (view.error, state.spec.long_window, state.spec.n_fft) == ("", 2048, 1024)
    assert controls.widgets["range"].max == controls.widgets["range"].value[1] == 4000
    assert (state.changes["sample_rate"], len(state.read()[0])) == (8000, 16_000)
    samples, _, mels = state.read()
    assert np.array_equal(mels, lm.log_mel(samples, state.spec, engine="cpu").astype(np.float16))
    written = read_spec(write_spec(tmp_path / "spec.json", state.changes).path)
    assert lm.MelSpec.preset(written.preset, **written.settings, duration_s=2.0) == state.spec
    state.change_spec(f_max_hz=3000.0)
    controls.update_widgets()
    controls.widgets["sample_rate"].value = 4096  # half of it is below f_max_hz
    assert "frequency limits" in view.error
    assert (state.spec.sample_rate, controls.widgets["sample_rate"].value) == (8000, 8000)


# ---- the whole split -----------------------------------------------------------------------------------------------


def test_the_whole_split_is_as_in_a_build(recordings, built):
    with lm.open_dataset(built) as ds:
        right, labels, spec = *recording_spectra(ds), ds.spec
    found = split_spectra(recordings, "TRAINING", spec)
    assert found[1] == labels
    assert np.array_equal(found[0], right)
    assert found[2] == "TRAINING: all 53 recordings that are not silent"


def test_a_sample_is_stated_and_even(recordings):
    spec = lm.MelSpec.preset("disjoint")
    found = split_spectra(recordings, "TRAINING", spec, most=10)
    whole = split_spectra(recordings, "TRAINING", spec)
    even = [0, 5, 11, 17, 23, 28, 34, 40, 46, 52]
    assert np.array_equal(found[0], whole[0][even])
    assert found[1] == [whole[1][k] for k in even]
    assert "TRAINING: an even sample of 10 of 53 recordings" in found[2]


# ---- spec files ----------------------------------------------------------------------------------------------------


def test_spec_written_by_explore_is_used_by_build(state, data, tmp_path, capsys):
    state.change_spec(preset="overlap", n_mels=24, n_fft=256)
    path = tmp_path / "spec.json"
    assert write_spec(path, state.changes) == read_spec(path)
    body = json.loads(path.read_text())
    assert body == {
        "kind": "leakmel spec",
        "schema": 1,
        "leakmel_version": lm.__version__,
        "preset": "overlap@2",
        "settings": {"n_mels": 24, "n_fft": 256},
    }
    assert (
        main(
            [
                "build",
                str(data),
                "--split",
                "testing",
                "--out",
                str(tmp_path / "x.h5"),
                "--spec",
                str(path),
                "--n-mels",
                "20",
                "--engine",
                "cpu",
                "--sample-rate",
                "4096",
                "--duration-s",
                "10",
                "--no-tuned",
                "--quiet",
            ]
        )
        == 0
    )
    assert (
        f"spec of {path}: preset overlap@2, n_mels 24, n_fft 256; n_mels 20 was asked for instead of 24"
        in " ".join(capsys.readouterr().out.split())
    )
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        assert ds.spec == lm.MelSpec.preset("overlap", n_mels=20, n_fft=256, **FIXED)
    assert (
        main(
            [
                "build",
                str(data),
                "--split",
                "testing",
                "--out",
                str(tmp_path / "y.h5"),
                "--spec",
                str(path),
                "--preset",
                "disjoint",
                "--quiet",
            ]
        )
        == 2
    )
    assert "Omit the preset" in capsys.readouterr().err
    assert (
        main(
            [
                "build",
                str(data),
                "--split",
                "testing",
                "--out",
                str(tmp_path / "y.h5"),
                "--spec",
                str(tmp_path / "none.json"),
                "--quiet",
            ]
        )
        == 1
    )
    assert "no such spec file" in capsys.readouterr().err
    assert not (tmp_path / "y.h5").exists()


def build_parameters(**given: Any) -> dict[str, Any]:
    "As build.ipynb has them."
    nb = nbformat.read(ROOT / "nbs" / "build.ipynb", as_version=4)
    values: dict[str, Any] = {}
    exec(next(c.source for c in nb.cells if "parameters" in c.metadata.get("tags", [])), values)
    return {name: values[name] for name in parameter_kinds(Build) if name in values} | given


def test_the_build_notebook_takes_a_spec_file(data, tmp_path):
    write_spec(tmp_path / "spec.json", {"preset": "overlap", "n_mels": 24, **FIXED})
    common = {
        "data_root": str(data),
        "split": "testing",
        "out": str(tmp_path / "out"),
        "spec_file": str(tmp_path / "spec.json"),
        "engine": "cpu",
    }
    plan = plan_run(build_parameters(**common))
    assert plan.spec == lm.MelSpec.preset("overlap", n_mels=24, **FIXED)
    assert f"{tmp_path}/spec.json: preset overlap@2, n_mels 24" in repr(plan)
    assert plan_run(build_parameters(**common, n_mels=20)).spec.n_mels == 20
    assert "n_mels 20 was asked for instead of 24" in repr(plan_run(build_parameters(**common, n_mels=20)))
    write_spec(tmp_path / "spec.json", {"n_mels": 24})
    with pytest.raises(UsageError, match="preset differs from the preset of the spec file"):
        plan_run(build_parameters(**common, preset="overlap"))
    assert "from" not in [
        line.split()[0]
        for line in repr(plan_run(build_parameters(**common | {"spec_file": ""}, **FIXED))).splitlines()
    ]


def body(**changes: Any) -> str:
    return json.dumps(
        {"kind": "leakmel spec", "schema": 1, "preset": "disjoint@2", "settings": {"n_mels": 40}} | changes
    )


@each(
    ("text", "code", "says"),
    [
        (body(extra=1), "unknown-setting", "extra"),
        (body(settings={"num_mels": 3}), "unknown-setting", "is called n_mels"),
        (body(settings={"preset_name": "x"}), "unknown-setting", "preset_name"),
        (body(settings={"n_mels": "40"}), "invalid-setting", "n_mels"),
        (body(settings={"n_mels": True}), "invalid-setting", "n_mels"),
        (body(settings={"mel_scale": "bark"}), "invalid-setting", "mel_scale"),
        (body(settings={"f_max_hz": 1e300}), "invalid-setting", "f_max_hz"),
        (body(settings={"f_max_hz": 10**400}), "invalid-setting", "f_max_hz"),
        (body(settings=[]), "invalid-setting", "settings"),
        (body(schema=2), "other-schema", "2"),
        (body(kind="x"), "not-a-spec-file", "x"),
        (body(preset="magic"), "unknown-preset", "magic"),
        (body(preset=["disjoint"]), "invalid-setting", "preset"),
        ("[]", "not-a-spec-file", ""),
        ("{", "not-a-spec-file", ""),
        (body().replace("40", "NaN"), "invalid-setting", "n_mels"),
        (body(settings={"f_min_hz": float("nan")}), "invalid-setting", "f_min_hz"),
        ("[" * 50_000, "not-a-spec-file", ""),
        (" " * MOST_BYTES + "{}", "not-a-spec-file", ""),
        ("\xff\xfe", "not-a-spec-file", ""),
        ("__import__('os').abort()", "not-a-spec-file", ""),
    ],
)
def test_hostile_spec_file_is_refused(tmp_path, text, code, says):
    path = tmp_path / "spec.json"
    path.write_bytes(text.encode("latin-1"))
    with raises(code, SpecError, path=path, says=says) as caught:
        read_spec(path)
    assert len(str(caught.value)) < 1200


def test_missing_or_special_spec_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for name, code in (("pipe.json", "not-a-file"), ("none.json", "no-such-file"), (".", "read-failed")):
        with raises(code, DataError, path=tmp_path / name):
            read_spec(tmp_path / name)


# a data set as the spec of a build


@pytest.fixture(scope="module")
def twelve(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("twelve")
    lm.write_demo(folder, n_files=12)
    return folder


def specs_of(*paths: Path) -> list[tuple[lm.MelSpec, str, int]]:
    "Spec, fingerprint and length of rows of data sets."
    found = []
    for path in paths:
        with lm.open_dataset(path) as ds:
            found.append((ds.spec, ds.file.attrs["fingerprint"], ds.mels.shape[1]))
    return found


@pytest.mark.slow
@each(
    ("preset", "changes"),
    [
        ("disjoint", {}),
        ("overlap", {}),
        ("disjoint", {"n_mels": 32, "f_min_hz": 100.0, "mel_norm": "slaney", "f_max_hz": 1000.0}),
        ("overlap", {"duration_s": 5.0, "floor": 1e-9, "channels": "first", "mel_norm": None}),
        ("disjoint", {"sample_rate": 2048, "power": 2.0, "mel_scale": "slaney"}),
    ],
)
def test_rows_that_are_built_with_a_data_set_are_like_its_rows(
    twelve, tmp_path, make_wav, capsys, preset, changes
):
    "Also where the new recordings are of another rate and length."
    lm.build(
        twelve,
        split="testing",
        out=tmp_path / "old.h5",
        spec=lm.MelSpec.preset(preset, **changes),
        progress="none",
        check=0,
    )
    make_wav(tmp_path / "new" / "2026-11-22" / "a.wav", n=8192 * 12, rate=8192)
    make_wav(tmp_path / "new" / "2026-11-23" / "b.wav", n=4096 * 7)
    words = ["build", str(tmp_path / "new"), "--out", str(tmp_path / "new.h5"), "--json", "--quiet"]
    assert main([*words, "--spec", str(tmp_path / "old.h5")]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 2
    old, new = specs_of(tmp_path / "old.h5", tmp_path / "new.h5")
    assert new == old
    assert new[0].preset_name == old[0].preset_name
    there = spec_of_data_set(tmp_path / "old.h5")
    assert there.preset == lm.MelSpec.preset(preset).preset_name
    assert there.settings == {"sample_rate": 4096, "duration_s": 10.0} | changes
    assert read_spec(write_spec(tmp_path / "spec.json", there.changes).path).changes == there.changes, (
        "as a spec file has it"
    )


@pytest.mark.slow
def test_given_settings_take_precedence_over_a_data_set_and_another_preset_is_an_error(
    twelve, tmp_path, capsys
):
    lm.build_all(
        twelve, out_dir=tmp_path, spec=lm.MelSpec.preset("disjoint", n_mels=32), progress="none", check=0
    )
    old = tmp_path / "TRAINING_DATASET.H5"
    changes, output = requested_spec(old, None, {"n_mels": 24})
    assert changes == {"preset": "disjoint@2", "sample_rate": 4096, "duration_s": 10.0, "n_mels": 24}
    assert (
        output
        == f"spec of {old}: preset disjoint@2, sample_rate 4096, duration_s 10.0, n_mels 32; n_mels 24 was asked for instead of 32"
    )
    with raises("presets-differ", UsageError, path=old, found="overlap"):
        requested_spec(old, "overlap", {})
    assert requested_spec(tmp_path, None, {})[0] == spec_of_data_set(old).changes, (
        "a folder of data sets stands for what is learned from"
    )
    assert (
        main(
            [
                "build",
                str(twelve),
                "--split",
                "testing",
                "--spec",
                str(old),
                "--out",
                str(tmp_path / "x.h5"),
                "--quiet",
            ]
        )
        == 0
    )
    assert f"spec of {old}: preset disjoint@2" in " ".join(capsys.readouterr().out.split())
    with lm.open_dataset(tmp_path / "x.h5") as ds:
        assert ds.spec.n_mels == 32


@pytest.mark.slow
def test_a_file_without_a_spec_is_an_error_on_one_line(twelve, tmp_path, capsys):
    whole = lm.build(twelve, split="testing", out=tmp_path / "whole.h5", progress="none", check=0).path
    with h5py.File(tmp_path / "other.h5", "w") as f:
        f["x"] = np.arange(3)
    with h5py.File(tmp_path / "earlier.h5", "w") as f:
        f["labels"], f["segments_mel"] = np.zeros(2, np.int16), np.zeros((2, 4, 2, 8, 1), np.float16)
        f.attrs["config_json"], f.attrs["labels_json"], f.attrs["label2id_json"] = (
            '{"n_mels": 8}',
            '["LEAK"]',
            '{"LEAK": 0}',
        )
    (tmp_path / "cut.h5").write_bytes(whole.read_bytes()[:9000])
    (tmp_path / "text.h5").write_text("no data set")
    (tmp_path / "empty.h5").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.h5")
    output = {
        "other.h5": "the spec cannot be read",
        "earlier.h5": "the spec cannot be read",
        "cut.h5": "the spec cannot be read",
        "text.h5": "not a spec file",
        "empty.h5": "not a spec file",
        "folder": "cannot be read",
        "pipe.h5": "not a regular file",
        "none.h5": "no such spec file",
    }
    for name, sentence in output.items():
        with pytest.raises(DataError):
            spec_of_data_set(tmp_path / name)
        assert main(
            [
                "build",
                str(twelve),
                "--spec",
                str(tmp_path / name),
                "--split",
                "testing",
                "--out",
                str(tmp_path / "x.h5"),
                "--quiet",
            ]
        ) in (1, 2)
        err = capsys.readouterr().err
        assert sentence in err
        assert err.startswith(f"leakmel build: {tmp_path / name}: ")
        assert (len(err.splitlines()), "legacy" in err) == (1, False)
    assert not (tmp_path / "x.h5").exists()


def test_writing_replaces_no_other_file(tmp_path):
    written = write_spec(tmp_path / "deep" / "spec.json", lm.MelSpec.preset("overlap", n_mels=20))
    assert lm.MelSpec.preset(written.preset, **written.settings) == lm.MelSpec.preset("overlap", n_mels=20)
    assert read_spec(write_spec(written.path, {"n_mels": 30}).path).settings == {
        "n_mels": 30
    }  # an older one may go
    for other in (body(schema=2), body(settings={"num_mels": 3})):  # ours, though it cannot be read
        written.path.write_text(other)
        assert read_spec(write_spec(written.path, {"n_mels": 30}).path).settings == {"n_mels": 30}
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    (tmp_path / "aim.json").write_text("kept")
    (tmp_path / "link.json").symlink_to(tmp_path / "aim.json")
    (tmp_path / "folder.json").mkdir()
    for name in ("mine.json", "link.json", "folder.json"):
        with raises("output-exists", OutputError, path=tmp_path / name):
            write_spec(tmp_path / name, {"n_mels": 30})
    with raises("unknown-setting", SpecError, says="is called n_mels"):
        write_spec(tmp_path / "new.json", {"num_mels": 30})
    with raises("not-json-name", OutputError, path=tmp_path / "new.txt"):
        write_spec(tmp_path / "new.txt", {"n_mels": 30})
    with raises("band-limits", SpecError):
        write_spec(tmp_path / "new.json", {"sample_rate": 4096, "duration_s": 1.0, "f_min_hz": 3000.0})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "aim.json",
        "deep",
        "folder.json",
        "link.json",
        "mine.json",
    ]
    assert [(tmp_path / n).read_text() for n in ("mine.json", "aim.json")] == ['{"mine": 1}', "kept"]


def test_only_the_requested_file_is_written(tmp_path):
    write_spec(tmp_path / "a.json", {"preset": "overlap", "mel_norm": None})
    changes, output = requested_spec(tmp_path / "a.json", "overlap@2", {})
    assert changes == {"preset": "overlap@2", "mel_norm": None}
    assert output == f"spec of {tmp_path}/a.json: preset overlap@2, mel_norm none"
    assert requested_spec("", None, {}) == ({"preset": "disjoint"}, "")


# ---- the page ------------------------------------------------------------------------------------------------------


def given(data: Path, **more: Any) -> dict[str, Any]:
    "Parameters as explore.ipynb has them, with other ones."
    nb = nbformat.read(ROOT / "nbs" / "explore.ipynb", as_version=4)
    values: dict[str, Any] = {}
    exec(next(c.source for c in nb.cells if "parameters" in c.metadata.get("tags", [])), values)
    values = {name: values[name] for name in explore_kinds()}
    check_types(values, explore_kinds())
    return values | {"data_root": str(data)} | more


def test_initial_filter_and_spec_are_parameters(data, built, tmp_path):
    write_spec(tmp_path / "spec.json", {"n_mels": 20})
    state = open_explorer(
        given(data, split="training", flag="clipped", spec_file=str(tmp_path / "spec.json")), progress="none"
    )
    assert (len(state.matching), state.changes, state.spec.n_mels) == (
        1,
        {"preset": "disjoint@2", "n_mels": 20},
        20,
    )
    state = open_explorer(given(data, spec_file=str(built), preset=None), progress="none")
    assert state.spec == lm.MelSpec.preset("overlap", n_mels=24, **FIXED)
    with pytest.raises(UsageError, match=r"label; found .*; expected LEAK, NOLEAK"):
        open_explorer(given(data, label="LEEK"), progress="none")
    with pytest.raises(UsageError, match="no recording matches the filter; found label NOLEAK, flag clipped"):
        open_explorer(given(data, label="NOLEAK", flag="clipped"), progress="none")


class Shown:
    "Outputs of a view, in place of a notebook's."

    def __init__(self) -> None:
        self.values: list[Any] = []

    def update(self, value: dict[str, Any], raw: bool) -> None:
        if not value.get("text/html", "").startswith("<div style='height"):  # the place of a figure
            self.values.append(value)


def test_a_view_redraws_changes_and_reports_rejected_ones(data, tmp_path):
    view = ExploreView(
        open_explorer(given(data, split="training"), progress="none"),
        controls=False,
        write_to=str(tmp_path / "spec.json"),
    )
    names = ("line", "figure", "sound", "split_line", "split_figure", "written")
    view.outputs = shown = {name: Shown() for name in names}

    def counts() -> list[int]:
        return [len(shown[n].values) for n in ("figure", "sound", "split_figure")]

    view.draw()
    view.recompute()
    assert counts() == [1, 1, 1]
    with pytest.raises(lm.LeakmelError) as rejected:
        view.state.change_spec(n_mels=256)
    view.error = str(rejected.value)
    view.draw()
    assert counts() == [1, 1, 1]
    assert "Rejected:</b> mel band 0" in shown["line"].values[-1]["text/html"]
    view.state.change_spec(n_mels=40)
    view.error = ""
    view.draw()
    assert counts() == [2, 1, 1]  # the sound stays
    assert "has changed since" in shown["split_line"].values[-1]["text/plain"]
    view.recompute()
    assert counts() == [2, 1, 2]
    assert view.split_shown[0] == view.state.spec
    view.write()
    assert "--spec" in shown["written"].values[-1]["text/plain"]
    view.draw()


def test_a_removed_recording_is_reported(tmp_path):
    write_demo(tmp_path / "demo", n_files=12)
    view = ExploreView(open_explorer(given(tmp_path / "demo"), progress="none"), controls=False)
    view.outputs = shown = {name: Shown() for name in ("line", "figure", "sound")}
    for path in (tmp_path / "demo").rglob("*.wav"):
        path.unlink()
    view.draw()
    assert (shown["figure"].values, "Rejected:" in shown["line"].values[-1]["text/html"]) == ([], True)


def test_lines_are_plain_text_and_safe_html():
    line = status_line("a <b> & c", "no <script>")
    assert "<script>" not in line["text/html"]
    assert "<b> &" not in line["text/html"]
    assert line["text/plain"] == "Rejected: no <script> (unchanged: a <b> & c)"


def test_sliders_are_shown_only_in_interactive_sessions(monkeypatch):
    for name in ("JPY_SESSION_NAME", "VSCODE_PID"):
        monkeypatch.delenv(name, raising=False)
    assert not shows_controls(None)
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    assert (shows_controls(None), shows_controls(False)) == (True, False)


# ---- the notebook --------------------------------------------------------------------------------------------------


def explore(project: Path, *args: str, data: Path, **more: str) -> Run:
    shutil.copy(ROOT / "nbs" / "explore.ipynb", project / "nbs")
    return papermill(project, *args, data=data, notebook="explore.ipynb", **more)


@pytest.mark.slow
def test_under_papermill_the_first_state_is_complete(data, tmp_path):
    run = explore(
        copy_project(tmp_path / "p"),
        "-p",
        "split",
        "training",
        "-p",
        "flag",
        "clipped",
        "-p",
        "most",
        "20",
        data=data,
    )
    assert run.status == 0, run.log
    assert run.errors == []
    recording, split = titles_of(run)
    assert recording.startswith("LEAK, sensor H101: ")
    assert "louder than" in split
    assert "Recording 1 of 1 (split TRAINING, flag clipped)" in run.text
    assert "TRAINING: an even sample of 20 of 53 recordings" in run.text
    assert "<audio" in run.text
    assert not any("widget" in kind for o in run.outputs for kind in o.get("data", {}))
    assert "widgets" not in nbformat.read(run.notebook, as_version=4).metadata
    assert sum(PLOTLY in o.get("data", {}) for o in run.outputs) == 2
    assert not list(run.project.rglob("specs"))


def test_a_wrong_parameter_stops_the_notebook():
    "Its own cells, with one that papermill puts behind the parameters."
    imports, parameters, first = [
        c.source
        for c in nbformat.read(ROOT / "nbs" / "explore.ipynb", as_version=4).cells
        if c.cell_type == "code"
    ][:3]
    names: dict[str, Any] = {}
    for cell in (imports, parameters, "n_mels = 40"):
        exec(cell, names)
    with raises("unknown-parameter", UsageError, says="n_mels is unknown"):
        exec(first, names)


def test_parameters_are_those_of_the_notebook():
    nb = nbformat.read(ROOT / "nbs" / "explore.ipynb", as_version=4)
    (cell,) = [c.source for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
    names = [line.split(" = ")[0] for line in cell.splitlines() if " = " in line and not line.startswith("#")]
    assert names == list(explore_kinds())
