"Retraining rounds with recordings shorter than a row: the padding after them changes neither selection nor training."

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from each import each
from errors import raises

import leakmel as lm
from leakmel.detector.data.segments import LEFT_OUT, Segments, make_task
from leakmel.detector.model.detector import Detector, class_scores, score_rows
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.train.state import TooShortWarning
from leakmel.extras.retrain import (
    UNLABELLED,
    RoundRules,
    SegmentSubset,
    confident_segments,
    draw_replay,
    read_human_labels,
    recording_paths,
    retrain,
    select_segments,
    weights_digest,
)
from leakmel.recordings.demo import write_wav

pytestmark = pytest.mark.usefixtures("one_thread")
RATE, TASK = 4096, make_task(["LEAK", "NOLEAK"])
PARTS = ("new", "old", "testing")
LENGTHS = (
    4096,
    1024,
    3071,
    300,
    2048,
    4096,
    4095,
    3072,
)  # samples of 4, 1, 2, no, 2, 4, 3 and 3 long segments


def spec_of(duration_s: float) -> lm.MelSpec:
    return lm.MelSpec.preset("disjoint", duration_s=duration_s)  # long segments of 1,024 samples


def made_detector() -> Detector:
    "A net that was never trained, with scores all over the range."
    torch.manual_seed(0)
    _, n_short, n_mels, n_frames = spec_of(1.0).row_shape
    net = LeakNet(
        NetSettings(n_mels, n_frames * n_short, channels=(4, 4)), np.full(n_mels, -30.0), np.full(n_mels, 3.0)
    )
    with torch.no_grad():
        net.classes.weight.mul_(20)
    return Detector(net.eval(), TASK, spec_of(1.0))


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> dict[float, dict[str, Path]]:
    "The same recordings of one second at most, in rows of one second and of two."
    root = tmp_path_factory.mktemp("heard")
    for p, part in enumerate(PARTS):
        for k in range(16):
            path = (
                root / part / TASK.class_names[k % 2] / f"S{p}{k // 2}~{k:04}~2024030{1 + k % 7}_020000~8.wav"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            level = 200 + 40 * k
            write_wav(
                path,
                np.random.default_rng([p, k]).integers(-level, level, LENGTHS[k // 2]).astype(np.int16),
                RATE,
            )

    def sets(duration_s: float) -> dict[str, Path]:
        return {
            n: lm.build(
                root / n,
                out=root / f"{n} {duration_s:g}.h5",
                spec=spec_of(duration_s),
                engine="torch",
                progress="none",
                pipeline=lm.PipelineConfig(device="cpu"),
            ).path
            for n in PARTS
        }

    return {s: sets(s) for s in (1.0, 2.0)}


def opened(network: dict[float, dict[str, Path]], part: str = "new", task: Any = None) -> list[Segments]:
    return [Segments(sets[part], level="recording", task=task) for sets in network.values()]


@each("share", [0.1, 0.5, 0.75, 1.0])
def test_half_of_the_existing_segments_are_selected(share):
    rng = np.random.default_rng(0)
    scores, leaks, n_heard = rng.integers(0, 4, (60, 7)) / 3, rng.random(60) < 0.5, rng.integers(1, 8, 60)
    found = confident_segments(
        np.where(np.arange(7) < n_heard[:, None], scores, np.nan), leaks, np.full(60, share)
    )
    for row, mask, leak, n in zip(scores, found, leaks, n_heard, strict=True):
        assert (
            mask[:n].tolist()
            == confident_segments(row[None, :n], np.array([leak]), np.array([share]))[0].tolist()
        )
        assert not mask[n:].any()


@pytest.mark.slow
def test_longer_rows_give_the_same_selection(network):
    detector, found = made_detector(), []
    for ds in opened(network):
        assert ds.n_too_short == 2
        scores = class_scores(detector, ds, files_per_batch=5)
        assert np.array_equal(~np.isnan(scores), np.repeat(ds.segment_mask[..., None], 2, axis=2))
        assert np.array_equal(
            scores[..., TASK.leak_in_model], score_rows(detector, ds, files_per_batch=5), equal_nan=True
        )
        output = np.where(np.arange(len(ds)) < 3, [1, 0, 1] + [UNLABELLED] * (len(ds) - 3), UNLABELLED)
        chosen = select_segments(detector, ds, scores, output, RoundRules())
        assert not (chosen.kept & ~ds.segment_mask).any()
        assert chosen.kept[3:].sum(1).tolist() == (-(-ds.segment_counts[3:] // 2)).tolist(), (
            "half of what was recorded, rounded up"
        )
        assert chosen.kept[:3].sum(1).tolist() == ds.segment_counts[:3].tolist(), (
            "all of what a person labelled"
        )
        items = SegmentSubset([(ds, np.where(chosen.kept, chosen.classes[:, None], LEFT_OUT))], TASK)
        batch = items.batch(np.arange(len(items)))
        found.append(
            (
                scores[:, :4],
                chosen.kept[:, :4],
                chosen.classes,
                chosen.score,
                batch.x.numpy(),
                batch.y.numpy(),
            )
        )
        ds.close()
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other, equal_nan=True)
    assert 0 < found[0][2].mean() < 1, "both classes"


@pytest.mark.slow
def test_longer_rows_are_replayed_the_same(network):
    found = []
    for ds in opened(network, "old", TASK):
        found.append(draw_replay(ds, 0.5, seed=3))
        ds.close()
    assert np.array_equal(found[0], found[1])


def test_label_of_a_too_short_recording_is_reported(network, tmp_path):
    table = tmp_path / "heard.csv"
    _, ds = opened(network)
    every = [os.fsdecode(p) for p in ds.sources[0].files["path"]]
    kept = {os.fsdecode(p) for p in recording_paths(ds)}
    short = [p for p in every if p not in kept]

    def heard(*paths: str) -> np.ndarray:
        table.write_text("\n".join(["path,label", *(f"{p},LEAK" for p in paths)]))
        return read_human_labels(table, ds, TASK)

    assert len(short) == 2
    with raises("unknown-recording", path=table, found=", ".join(short)):
        heard(*kept, *short)
    assert (heard(*kept) != UNLABELLED).all()
    ds.close()


def a_round(sets: dict[str, Any], out: Path) -> Any:
    settings = TrainSettings(
        detector="cnn", epochs=2, batch_size=8, channels=(4, 4), seed=1, learning_rate=1e-3
    )
    return retrain(
        made_detector(),
        sets["new"],
        replay=sets["old"],
        testing=sets["testing"],
        out=out,
        rules=RoundRules(n_draws=100),
        settings=settings,
        device="cpu",
        progress=False,
    )


@pytest.mark.slow
def test_longer_rows_give_the_same_round(network, tmp_path):
    done = []
    for duration_s, sets in network.items():
        with pytest.warns(TooShortWarning) as caught:
            done.append(a_round(sets, tmp_path / f"{duration_s:g}"))
        assert [str(w.message).split(" are ")[0] for w in caught] == [
            f"{n}: 2 of 16 recordings" for n in ("new recordings", "replay", "testing")
        ]
        assert all(w.filename.endswith("test_learn_short_recordings_rounds.py") for w in caught)
    one, other = (r.record for r in done)
    assert weights_digest(done[0].challenger) == weights_digest(done[1].challenger)
    for same in ("kept", "kept_digest", "replay", "metrics", "reason"):
        assert one[same] == other[same]
    assert [caught["too_short"] for caught in (other["new"], other["old"], other["testing"]["testing"])] == [
        2,
        2,
        2,
    ]
    assert "; 2 too short, left out" in repr(done[1])


@pytest.mark.slow
def test_selected_rows_report_the_number_of_too_short_recordings(network, tmp_path):
    "A part that is given as Segments holds the others only."
    new = Segments(network[2.0]["new"], level="recording", preload_to_ram=False)
    with pytest.warns(TooShortWarning) as caught:
        done = a_round(network[2.0] | {"new": new}, tmp_path / "rounds")
    assert str(caught[0].message).startswith("new recordings: 2 of 16 recordings are shorter")
    assert (done.record["new"]["recordings"], done.record["new"]["too_short"]) == (14, 2)
    new.close()
