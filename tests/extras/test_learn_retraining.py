"Retraining rounds: selected segments, labels by people, replay, promotion, and interruption."

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from champions import load_champion
from each import each
from errors import raises
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from made_detectors import earlier_system

import leakmel as lm
from leakmel.core.errors import DataError, OutputError, UsageError
from leakmel.core.files import write_whole
from leakmel.detector.data.segments import LEFT_OUT, Segments, make_task, open_loader
from leakmel.detector.data.splits import LeakySplitWarning, recordings_of
from leakmel.detector.metrics.metrics import UNCHOSEN
from leakmel.detector.metrics.significance import Groups, recording_groups
from leakmel.detector.model.card import provenance_of
from leakmel.detector.model.detector import Detector, class_scores, load_detector, score_rows
from leakmel.detector.model.files import (
    CHAMPION_FILE,
    RECORD,
    Champion,
    Lineage,
    champion_file,
    read_lineage,
    round_folder,
    write_lineage,
)
from leakmel.detector.model.net import LeakNet, NetSettings
from leakmel.detector.model.settings import TrainSettings
from leakmel.detector.train import loop
from leakmel.detector.train.loop import CheckpointSettings
from leakmel.extras import retrain as rounds
from leakmel.extras.retrain import (
    UNLABELLED,
    RoundRules,
    SegmentSubset,
    apply_human_labels,
    check_overlap,
    compare_models,
    confident_segments,
    decide,
    draw_replay,
    finish_interrupted_round,
    labels_by_content,
    part_digest,
    read_human_labels,
    recording_paths,
    retrain,
    save_champion,
    select_segments,
    weights_digest,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TASK = make_task(["LEAK", "NOLEAK"])
THREE = make_task(["HUM", "LEAK", "QUIET"])
SMALL = TrainSettings(
    detector="cnn",
    epochs=2,
    epoch_share=0.5,  # about 15 steps
    batch_size=128,
    channels=(4, 8),
    seed=1,
    learning_rate=1e-3,
)


def build_network(folder: Path, seed: int, n_files: int) -> dict[str, Path]:
    "Data sets of a synthetic network."
    lm.write_demo(folder / f"{seed}", n_files=n_files, seed=seed)
    return {
        r.path.name.split("_")[0].lower(): r.path
        for r in lm.build_all(folder / f"{seed}", out_dir=folder / f"sets {seed}", progress="none", check=2)
    }


@pytest.fixture(scope="module")
def networks(tmp_path_factory) -> list[dict[str, Path]]:
    folder = tmp_path_factory.mktemp("networks")
    return [build_network(folder, 0, 60), build_network(folder, 1, 150)]


def fresh(seed: int = 0, task: Any = TASK, spec: Any = None, **settings: Any) -> Detector:
    "An untrained detector."
    torch.manual_seed(seed)
    net = LeakNet(
        NetSettings(width=2, n_classes=len(task.model_names), channels=(4, 8), dropout=0.1),
        np.full(64, -60.0),
        np.full(64, 10.0),
    )
    return Detector(net, task, spec, record={"settings": settings} if settings else {})


def recordings(path: Path, task: Any = None, **how: Any) -> Segments:
    return Segments(path, level="recording", task=task, **how)


# Which segments


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.5001, 1.0]), min_size=5, max_size=5),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
@hypothesis_settings(max_examples=80, deadline=None, derandomize=True, database=None)
def test_half_of_segments_with_the_clearest_scores_is_kept(scores, data):
    table = np.array(scores)
    leaks = np.array(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    kept = confident_segments(table, leaks, np.full(len(scores), 0.5))
    assert kept.sum(1).tolist() == [3] * len(scores)  # half of 5, rounded up
    for row, mask, leak in zip(table, kept, leaks, strict=True):
        if leak:
            assert row[mask].min() >= row[~mask].max()
        else:
            assert row[mask].max() <= row[~mask].min()


def select(scores: np.ndarray, human: list[int] | None = None, task: Any = THREE, **how: Any) -> Any:
    "What a detector of three classes would keep, by given scores."

    class Rows:
        level, rows, row_shape, sources = (
            "recording",
            np.arange(len(scores)),
            (scores.shape[1], 2, 64, 1),
            [type("S", (), {"path": "x"})],
        )
        segment_mask = np.ones(scores.shape[:2], bool)

    output = np.full(len(scores), UNLABELLED) if human is None else np.array(human)
    return select_segments(fresh(task=task), Rows(), scores, output, RoundRules(**how))  # type: ignore[arg-type]


def three_class_scores(*leak_scores: list[float], hum: float = 0.75) -> np.ndarray:
    "[n, L, 3]: of what the leak leaves, a share is hum."
    leak = np.array(leak_scores)
    return np.stack([(1 - leak) * hum, leak, (1 - leak) * (1 - hum)], -1)


def test_classes_follow_the_vote_and_the_likeliest_other_class():
    found = select(three_class_scores([0.9, 0.8, 0.1, 0.6], [0.1, 0.2, 0.9, 0.0]))
    assert found.classes.tolist() == [1, 0]
    assert found.kept.tolist() == [[True, True, False, False], [True, False, False, True]]
    assert select(three_class_scores([0.1, 0.2, 0.3, 0.2], hum=0.2)).classes.tolist() == [2]
    mixed = three_class_scores([0.0, 0.0, 0.6, 0.6])
    mixed[0, :2] = 0, 0, 1  # the trusted segments are quiet, the others hum
    assert select(mixed).classes.tolist() == [2]


def test_human_labels_override_predictions():
    scores = three_class_scores(
        [0.9, 0.8, 0.7, 0.6], [0.1, 0.2, 0.3, 0.0], [0.9, 0.9, 0.9, 0.9], [0.9, 0.1, 0.9, 0.9]
    )
    found = select(scores, [2, 1, LEFT_OUT, UNLABELLED])
    assert found.classes.tolist() == [2, 1, LEFT_OUT, 1]
    assert found.kept.sum(1).tolist() == [4, 4, 0, 2], "a labelled recording counts as a whole"
    assert np.count_nonzero(found.by_human & (found.classes != found.predicted)) == 3
    assert found.by_human.tolist() == [True, True, True, False]
    half = select(scores, [2, 1, LEFT_OUT, UNLABELLED], keep_share_human=0.5)
    assert half.kept[0].tolist() == [False, False, True, True], (
        "of what a person calls normal, the bottom half"
    )
    assert half.kept[1].tolist() == [False, True, True, False], "of what a person calls a leak, the top half"


def test_human_label_corrects_the_training_class():
    "A pump that starts halfway, which the detector takes for a leak: half of the segments would leave the pump out."
    pump = three_class_scores([0.05, 0.1, 0.9, 0.95], hum=0.5)
    assert select(pump, [0]).kept[0].all()
    assert select(pump, [0], keep_share_human=0.5).kept[0].tolist() == [True, True, False, False]
    assert RoundRules().keep_share_human == 1.0


@pytest.mark.slow
def test_non_finite_scores_are_refused(networks):
    detector = fresh(task=THREE)
    with torch.no_grad():
        next(detector.classifier.parameters()).fill_(torch.nan)
    with recordings(networks[1]["testing"]) as new, raises("invalid-scores", path=networks[1]["testing"]):
        class_scores(detector, new)


def test_class_scores_are_those_of_the_detector(networks):
    with recordings(networks[1]["testing"]) as new:
        detector = fresh(task=THREE)
        scores = class_scores(detector, new, files_per_batch=5)
        assert np.array_equal(scores[..., 1], score_rows(detector, new, files_per_batch=5))
        assert np.allclose(scores.sum(-1), 1, atol=1e-5)


# Replay


def test_replay_is_a_share_of_each_class(networks):
    with recordings(networks[0]["training"], TASK) as old:
        n = [int((old.labels == k).sum()) for k in (0, 1)]
        for share in (0.25, 0.5, 1.0):
            drawn = draw_replay(old, share, seed=3)
            assert [int((drawn & (old.labels == k)).sum()) for k in (0, 1)] == [round(share * m) for m in n]
        assert np.array_equal(draw_replay(old, 0.5, 3, 1), draw_replay(old, 0.5, 3, 1))
        assert not np.array_equal(draw_replay(old, 0.5, 3, 1), draw_replay(old, 0.5, 3, 2)), (
            "another round, other recordings"
        )
        few = draw_replay(old, 1e-6)
        assert [int((few & (old.labels == k)).sum()) for k in (0, 1)] == [1, 1], "no class is left out"
    with (
        recordings(networks[0]["training"], TASK, rows=np.flatnonzero(old.labels == 0)) as leaks,
        raises("class-missing", says="NOLEAK"),
    ):
        draw_replay(leaks)


# Items


@pytest.mark.parametrize("kind", ["device", "stream"])
def test_selected_items_can_be_loaded_and_resumed(networks, kind):
    with recordings(networks[0]["training"], TASK) as old, recordings(networks[1]["training"]) as new:
        rng = np.random.default_rng(0)
        kept, classes = rng.random((len(new), new.row_shape[0])) < 0.3, rng.integers(-1, 2, len(new))
        whole = np.full((len(old), old.row_shape[0]), LEFT_OUT)
        whole[[1, 5]] = old.labels[[1, 5], None]
        picked = SegmentSubset(
            [(new, np.where(kept, classes[:, None], LEFT_OUT)), (old, whole)],
            TASK,
            preload_to_ram=kind == "device",
        )
        assert len(picked) == kept[classes >= 0].sum() + 2 * old.row_shape[0]
        wanted: dict[int, tuple[torch.Tensor, int]] = {}
        for ds, mask, of in (
            (new, kept, classes),
            (old, np.isin(np.arange(len(old)), [1, 5])[:, None].repeat(old.row_shape[0], 1), old.labels),
        ):
            for row, segment in zip(*np.nonzero(mask & (of >= 0)[:, None]), strict=True):
                x = torch.from_numpy(ds.sources[0].mels[row, segment])
                wanted[len(wanted)] = x, int(of[row])

        def loader() -> Any:
            return open_loader(picked, 50, kind=kind, seed=5, block_rows=30 if kind == "stream" else None)

        with loader() as one:
            batches = list(one)
            items = torch.cat([b.items for b in batches])
            assert sorted(items.tolist()) == list(range(len(picked)))
            assert items.tolist() != sorted(items.tolist())
            for b in batches:
                assert b.y.tolist() == [wanted[i][1] for i in b.items.tolist()]
                assert torch.equal(b.x, torch.stack([wanted[i][0] for i in b.items.tolist()]))
        with loader() as two:
            walk = iter(two)
            for _ in range(3):
                next(walk)
            state = two.order.state_dict()
        with loader() as three_:
            three_.order.load_state_dict(state)
            assert torch.equal(torch.cat([b.items for b in three_]), items[150:])
        picked.close()
        assert len(new.read(np.arange(2))) == 2, "the data sets stay open"


# People


def test_human_label_tables_are_checked(networks, tmp_path):
    table = tmp_path / "heard.csv"
    with recordings(networks[1]["testing"]) as new:
        paths = [os.fsdecode(p) for p in recording_paths(new)]

        def heard(*lines: str, columns: str = "path,label") -> list[int]:
            table.write_text("\n".join([columns, *lines]))
            return read_human_labels(
                table, new, make_task(["LEAK", "NOLEAK", "PUMP"], leave_out=["PUMP"])
            ).tolist()

        assert heard(f"{paths[2]},noleak", f"{paths[0]},Leak", f"{paths[4]},PUMP")[:5] == [
            0,
            UNLABELLED,
            1,
            UNLABELLED,
            LEFT_OUT,
        ]
        cases: list[tuple[list[str], str]] = [
            ([f"{paths[0]},LEAKY"], "the label of"),
            ([f"{paths[0]},LEAK", "a/b.wav,LEAK"], "a/b.wav"),
            ([], "names no recording"),
            ([f"{paths[0]},LEAK", f"{paths[0]},LEAK"], "same as in line 2"),
        ]
        for lines, output in cases:
            with pytest.raises(DataError, match=output):
                heard(*lines)
        assert heard(f"{paths[0]},", f"{paths[1]},LEAK")[:2] == [UNLABELLED, 0]  # not labelled yet
        with pytest.raises(DataError, match="no column label"):
            heard(f"{paths[0]},LEAK", columns="path,verdict")
        assert heard(f"{paths[0]} ,LEAK")[0] == 0, "a blank at the end makes no difference"
        for wrong in (paths[0].upper(), f"{paths[0]}x"):
            with raises("unknown-recording", path=table, found=wrong):
                heard(f"{wrong},LEAK")
        with recordings(networks[1]["testing"], rows=np.array([1, 2])) as some:
            table.write_text(f"path,label\n{paths[0]},LEAK\na.wav,LEAK\n")
            with raises("unknown-recording", path=table, found=f"{paths[0]}, a.wav"):
                read_human_labels(table, some, TASK)
    table.write_text(f"path,label\n{paths[0]},LEAK\n")
    with (
        Segments([networks[1]["testing"]] * 2, level="recording") as twice,
        raises("ambiguous-recording", path=table),
    ):
        read_human_labels(table, twice, TASK)


def test_human_labels_apply_to_copies(networks):
    with Segments([networks[1]["testing"]] * 2, level="recording") as twice:
        n = len(twice) // 2
        output = np.full(2 * n, UNLABELLED)
        output[[0, n + 1, 2]] = 1, 0, LEFT_OUT
        wanted = np.full(2 * n, UNLABELLED)
        wanted[[0, n, 1, n + 1, 2, n + 2]] = 1, 1, 0, 0, LEFT_OUT, LEFT_OUT
        for given in (output, wanted):
            assert (
                apply_human_labels(twice, given, labels_by_content(twice, given)).tolist() == wanted.tolist()
            )
        output[n] = 0
        path = os.fsdecode(recording_paths(twice)[0])
        with raises("labels-contradict", path=networks[1]["testing"], found=path):
            labels_by_content(twice, output)


# Who wins


def compare(one: np.ndarray, other: np.ndarray, n_groups: int = 12) -> Any:
    truth = np.arange(len(one)) % 2 == 0
    groups = Groups("sensor", np.arange(len(one)) // 2 % n_groups, tuple(f"{k:02}" for k in range(n_groups)))
    detector = fresh()
    models = {"champion": (detector, one[:, None]), "challenger": (detector, other[:, None])}
    return compare_models(truth, groups, models, RoundRules())


@pytest.mark.slow
def test_only_a_paired_interval_above_0_replaces_the_champion():
    rng = np.random.default_rng(0)
    truth = np.arange(240) % 2 == 0
    blind, fair, good = rng.random(240), rng.random(240) + 0.3 * truth, rng.random(240) + 2 * truth
    wins, why = decide(compare(fair, good))
    assert wins
    assert why.startswith("The challenger replaces the champion: AUC +")
    for one, other, output in (
        (good, fair, "is worse"),
        (good, good, "not shown"),
        (fair, fair + 1e-9, "not shown"),
        (good, blind, "is worse"),
    ):
        wins, why = decide(compare(one, other))
        assert (wins, output in why, why.startswith("The champion stays")) == (False, True, True), why
    a_little = next(
        d
        for d in (compare(fair, fair + 0.4 * rng.random(240)) for _ in range(20))
        if d.differences["auc"].value > 0
    )
    assert decide(a_little)[0] is False, "a little better in the figure is not enough"
    wins, why = decide(compare(fair, good, n_groups=4))
    assert not wins
    assert "an interval needs at least 5" in why


# Rounds


def round_arguments(networks: list[dict[str, Path]], folder: Path, **how: Any) -> dict[str, Any]:
    "What a round is given."
    with lm.open_dataset(networks[0]["training"]) as ds:
        spec = ds.spec
    first = fresh(spec=spec, epochs=6, batch_size=128, learning_rate=4e-3)
    return {
        "champion": first,
        "new_data": networks[1]["training"],
        "replay": networks[0]["training"],
        "testing": networks[1]["testing"],
        "out": folder,
        "settings": SMALL,
        "rules": RoundRules(n_draws=200),
        "device": "cpu",
        "progress": False,
        "checkpoints": CheckpointSettings(fsync=False),
        **how,
    }


def past(folder: Path) -> list[int]:
    "The rounds that champions came from."
    lineage = read_lineage(folder)
    return [] if lineage is None else [c.round for c in lineage.champions]


def files_of(folder: Path) -> dict[str, bytes]:
    "What a round promises to be the same each time."
    names = {"champion.json", "record.json", "kept.csv", "model.pt"}
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.name in names}


def by_rule(monkeypatch: pytest.MonkeyPatch, wins: bool) -> None:
    monkeypatch.setattr(rounds, "decide", lambda *a: (wins, "as the test wants it."))


@pytest.fixture(scope="module")
def one_round(networks, tmp_path_factory) -> tuple[Any, dict[str, Any], Path]:
    "A round with everything in it."
    folder = tmp_path_factory.mktemp("rounds")
    with recordings(networks[1]["training"]) as new:
        paths = [os.fsdecode(p) for p in recording_paths(new)]
    table = folder / "heard.csv"
    table.write_text(f"path,label\n{paths[0]},NOLEAK\n{paths[1]},LEAK\n")
    given_ = round_arguments(
        networks, folder / "rounds", human_labels=table, validation=networks[0]["validation"]
    )
    return retrain(**given_), given_, folder


def test_what_is_learned_from_validation_is_not_predicted(networks, tmp_path, monkeypatch):
    "Recordings that are new and validation are learned once, with their label."
    seen = learned_by(monkeypatch)
    path = networks[1]["validation"]
    given_ = round_arguments(networks, tmp_path, settings=replace(SMALL, epochs=1))
    with recordings(path, TASK) as validation:
        n, n_long, labels = len(validation), validation.row_shape[0], validation.labels
        given_["champion"] = replace(given_["champion"], provenance=provenance_of([validation]))
    done = retrain(**given_ | {"new_data": [path, networks[1]["training"]]}, validation=path)
    assert done.record["new"]["left_to_replay"] == n
    assert taught_classes(seen[0], n_long, [], n) == {}
    before = [path, networks[1]["training"], networks[0]["training"]]
    assert taught_classes(seen[0], n_long, before, n) == {k: {int(labels[k])} for k in range(n)}


@pytest.mark.slow
def test_what_the_champion_knows_is_not_known_of_earlier_files(networks):
    "A data set without digests may have been learned from: it does not choose a threshold."
    with recordings(networks[0]["validation"], TASK) as validation:
        champion = fresh(spec=validation.sources[0].spec)
        assert rounds._held_back(champion, validation) is validation
        old = replace(champion, provenance=replace(champion.provenance, recordings=np.arange(1, 3)))
        assert rounds._held_back(old, validation) is None, "marks of audio are missing"


@each("knows", [True, False])
def test_validation_that_the_champion_knows_is_learned_from(networks, tmp_path, monkeypatch, knows):
    "It cannot choose the epoch and the threshold of a network that starts from this champion."
    seen = learned_by(monkeypatch)
    given_ = round_arguments(networks, tmp_path, settings=replace(SMALL, epochs=1))
    with recordings(networks[0]["validation"], TASK) as validation:
        n = len(validation)
        if knows:
            given_["champion"] = replace(given_["champion"], provenance=provenance_of([validation]))
    done = retrain(**given_, validation=networks[0]["validation"])
    assert (seen[0][3][2:] == [n]) == knows
    assert done.record["validation"]["is_learned"] == knows
    assert (f"; and {n} of validation" in repr(done)) == knows
    assert (done.challenger.held_out is None) == knows
    assert done.challenger.threshold_from == UNCHOSEN if knows else str(n) in done.challenger.threshold_from


@pytest.mark.slow
def test_the_record_is_complete(one_round, networks):
    done, _, folder = one_round
    here = folder / "rounds" / "round-0001"
    record = json.loads((here / RECORD).read_text())
    assert record == done.record | {"digest": record["digest"]}
    written = {"history.csv", "kept.csv", "model.pt", "model_card.md", "record.json", "summary.json"}
    assert set(os.listdir(here)) == written
    assert {
        "number",
        "replaced",
        "reason",
        "champion",
        "challenger",
        "stamps",
        "rules",
        "settings",
        "new",
        "old",
        "validation",
        "testing",
        "kept",
        "replay",
        "human_labels",
        "metrics",
        "leakmel_version",
    } <= set(record)
    with lm.open_dataset(networks[1]["training"]) as new, lm.open_dataset(networks[0]["training"]) as old:
        n_new, n_long, n_again = (
            len(new),
            old.mels.shape[1],
            sum(round(0.5 * int((old.labels == k).sum())) for k in (0, 1)),
        )
    assert sum(c["recordings"] for c in record["kept"].values()) == n_new
    assert [c["by_human"] for c in record["kept"].values()] == [1, 1]
    changed = [h["class"] != h["predicted"] for h in record["human_labels"]]
    assert record["overruled"] == sum(changed)
    assert sum(c["segments"] for c in record["kept"].values()) == (n_new - 2) * -(-n_long // 2) + 2 * n_long
    assert record["replay"] == {"recordings": n_again, "segments": n_again * n_long}
    assert sum(c["segments_by_human"] for c in record["kept"].values()) == 2 * n_long
    assert record["challengers_judged"] == 1
    assert "1 challenger has been compared" in record["reason"]
    assert "it is called better by chance would be about 2.5%" in record["reason"]
    assert [h["class"] for h in record["human_labels"]] == ["NOLEAK", "LEAK"]
    assert set(record["metrics"]) == set(record["testing"]) == {"testing"}
    assert record["metrics"]["testing"]["differences"]["auc"]["low"] is not None
    for output in record["metrics"].values():
        auc = output["differences"]["auc"]
        assert auc["note"] if auc["low"] is None else auc["low"] <= auc["value"] <= auc["high"]
        assert {"low", "high", "value"} <= set(output["champion"]["figures"]["auc"])
    lines = (here / "kept.csv").read_text().splitlines()
    assert len(lines) == n_new + 1
    assert lines[1].split(",")[1:3] == ["NOLEAK", "human"]
    assert len(lines[3].split(",")[5].split()) == -(-n_long // 2)
    assert (record["settings"]["channels"], record["settings"]["dropout"]) == ([4, 8], 0.1), (
        "the net is the champion's"
    )
    assert load_detector(here / "model.pt").record["round"]["number"] == 1
    assert done.replaced == record["replaced"] == (past(folder / "rounds") == [0, 1])
    assert done.reason in repr(done)
    assert list(done.table().columns) == ["champion", "challenger", "difference"]


@pytest.mark.slow
def test_the_same_round_gives_the_same_bytes(one_round, tmp_path):
    done, given_, folder = one_round
    again = retrain(**given_ | {"out": tmp_path / "again"})
    assert files_of(tmp_path / "again") == files_of(folder / "rounds")
    assert again.reason == done.reason
    other = retrain(**given_ | {"out": tmp_path / "other", "settings": replace(SMALL, seed=2)})
    assert weights_digest(other.challenger) != weights_digest(done.challenger)


def test_a_challenger_starts_from_the_champion(networks, tmp_path):
    still = replace(SMALL, epochs=1, learning_rate=1e-9)
    done = retrain(**round_arguments(networks, tmp_path, settings=still))
    first = load_detector(round_folder(tmp_path, 0) / "model.pt")
    for name, w in done.challenger.classifier.state_dict().items():
        assert torch.allclose(w, first.classifier.state_dict()[name], atol=1e-6), name
    assert not done.replaced
    assert "not shown to be better" in done.reason


@pytest.mark.slow
def test_rounds_follow_each_other(networks, tmp_path, monkeypatch):
    given_ = round_arguments(networks, tmp_path)
    first = weights_digest(given_["champion"])
    by_rule(monkeypatch, False)
    lost = retrain(**given_)
    assert not lost.replaced
    assert (
        weights_digest(load_champion(tmp_path))
        == first
        == weights_digest(lost.champion)
        != weights_digest(lost.challenger)
    )
    by_rule(monkeypatch, True)
    won = retrain(**given_ | {"champion": None})
    assert won.number == 2
    assert (
        weights_digest(load_champion(tmp_path))
        == weights_digest(won.challenger)
        == weights_digest(won.champion)
    )
    by_rule(monkeypatch, False)
    third = retrain(**given_)  # the first champion is known here: the last one goes on
    assert third.number == 3
    assert third.record["champion"]["round"] == 2
    assert past(tmp_path) == [0, 2]
    with raises("another-champion", path=tmp_path):
        retrain(**given_ | {"champion": fresh(9, spec=given_["champion"].spec)})
    with raises("another-test-set", path=tmp_path):
        retrain(**given_ | {"testing": networks[0]["testing"]})
    with raises("champion-missing", path=tmp_path / "empty"):
        retrain(**given_ | {"champion": None, "out": tmp_path / "empty"})


def halves(path: Path) -> list[Segments]:
    "The recordings of a data set, the even and the odd ones."
    n = len(lm.open_dataset(path))
    return [recordings(path, rows=np.arange(k, n, 2), preload_to_ram=False) for k in (0, 1)]


def learned_by(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    "The items of each training to come."
    seen, real = list[Any](), rounds.fine_tune

    def fine_tune(champion: Detector, items: SegmentSubset, *a: Any, **k: Any) -> Detector:
        seen.append((len(items), items.numbers.copy(), items.labels.copy(), [len(s) for s in items.sources]))
        return real(champion, items, *a, **k)

    monkeypatch.setattr(rounds, "fine_tune", fine_tune)
    return seen


def labels_table(path: Path, of: Segments, n: int | None = None) -> Path:
    "A table in which people give the first recordings the other class."
    pairs = zip(recording_paths(of), of.labels.tolist(), strict=True)
    lines = [f"{os.fsdecode(p)},{TASK.model_names[1 - k]}\n" for p, k in pairs]
    path.write_text("path,label\n" + "".join(lines[:n]))
    return path


def taught_classes(seen: Any, n_long: int, before: list[Path], n: int) -> dict[int, set[int]]:
    "The classes that were taught of each recording of a data set that stands behind others."
    start = 0
    for path in before:
        with lm.open_dataset(path) as ds:
            start += len(ds)
    rows = seen[1] // n_long - start
    return {k: set(seen[2][rows == k].tolist()) for k in range(n) if (rows == k).any()}


@pytest.mark.slow
def test_human_labels_apply_to_replayed_recordings(networks, tmp_path, monkeypatch):
    "Recordings that are replayed too are labelled anew: nobody teaches both classes of one."
    path, seen = networks[0]["training"], learned_by(monkeypatch)
    given_ = round_arguments(networks, tmp_path, settings=replace(SMALL, epochs=1), new_data=path)
    with recordings(path, TASK) as old:
        table = labels_table(tmp_path / "heard.csv", old)
        wanted, n, n_long = {k: {1 - int(c)} for k, c in enumerate(old.labels)}, len(old), old.row_shape[0]
    by_rule(monkeypatch, True)
    first = retrain(**given_, human_labels=table)
    assert taught_classes(seen[0], n_long, [], n) == wanted
    again = taught_classes(seen[0], n_long, [path], n)
    assert len(again) == first.record["replay"]["recordings"] > 0
    assert again == {k: wanted[k] for k in again}
    retrain(**given_ | {"new_data": networks[1]["validation"]})
    later = taught_classes(seen[1], n_long, [networks[1]["validation"]], n)
    assert later == {k: wanted[k] for k in later} != {}, "and in later rounds"


@pytest.mark.slow
def test_new_recordings_in_replay_data_are_trained_from_replay(networks, tmp_path, monkeypatch):
    "Their labels are known: a prediction is not taught beside them, unless a person says something."
    path, seen = networks[0]["training"], learned_by(monkeypatch)
    given_ = round_arguments(
        networks, tmp_path, settings=replace(SMALL, epochs=1), new_data=[path, networks[1]["validation"]]
    )
    with recordings(path, TASK) as old:
        n, n_long, labels = len(old), old.row_shape[0], old.labels
        heard = labels_table(tmp_path / "heard.csv", old, 3)
    by_rule(monkeypatch, True)
    with raises("nothing-to-learn", says=f"{n} of {n}"):
        retrain(**given_ | {"new_data": path})
    first = retrain(**given_)
    assert first.record["new"]["left_to_replay"] == n
    assert f"{n} in the replay data and learned from there" in repr(first)
    assert taught_classes(seen[-1], n_long, [], n) == {}, "as new ones"
    again = taught_classes(seen[-1], n_long, [path, networks[1]["validation"]], n)
    assert again == {k: {int(labels[k])} for k in again} != {}, "from replay"
    second = retrain(**given_, human_labels=heard)
    output = {k: {1 - int(labels[k])} for k in range(3)}
    assert second.record["new"]["left_to_replay"] == n - 3
    assert taught_classes(seen[-1], n_long, [], n) == output
    third = retrain(**given_)
    assert third.record["new"]["left_to_replay"] == n - 3
    assert taught_classes(seen[-1], n_long, [], n) == output, "what was said before still counts"
    assert third.selection.by_human.sum() == 3


def test_labels_of_a_rejected_round_are_forgotten(networks, tmp_path, monkeypatch):
    path, seen = networks[0]["training"], learned_by(monkeypatch)
    given_ = round_arguments(networks, tmp_path, settings=replace(SMALL, epochs=1))
    with recordings(path, TASK) as old:
        n, n_long, labels = len(old), old.row_shape[0], old.labels
        table = labels_table(tmp_path / "heard.csv", old)
    by_rule(monkeypatch, False)
    retrain(**given_ | {"new_data": path}, human_labels=table)
    other = networks[1]["validation"]
    retrain(**given_ | {"new_data": other})
    again = taught_classes(seen[-1], n_long, [other], n)
    assert again == {k: {int(labels[k])} for k in again} != {}


@pytest.mark.slow
def test_folder_of_a_champion_is_not_reused(networks, tmp_path, monkeypatch):
    "The record of a champion's round was cleared away; its model was not."
    given_ = round_arguments(networks, tmp_path, settings=replace(SMALL, epochs=1))
    by_rule(monkeypatch, True)
    won = retrain(**given_)
    by_rule(monkeypatch, False)
    for damaged in (b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"human_labels": [1]}'):
        (won.folder / RECORD).write_bytes(damaged)
        with raises("not-a-round", path=won.folder / RECORD, says="are then not known"):
            retrain(**given_)
    (won.folder / RECORD).unlink()
    for _ in range(2):
        with pytest.warns(UserWarning, match="labels by people of this round are not known"):
            assert retrain(**given_ | {"resume": "never"}).number == 2
        (round_folder(tmp_path, 2) / RECORD).unlink()
    assert weights_digest(load_champion(tmp_path)) == weights_digest(won.challenger)


def test_rounds_without_a_champion_file_are_refused(networks, tmp_path, monkeypatch):
    given_ = round_arguments(networks, tmp_path, settings=replace(SMALL, epochs=1))
    by_rule(monkeypatch, True)
    retrain(**given_)
    (tmp_path / CHAMPION_FILE).unlink()
    with pytest.raises(DataError, match=r"missing; found 1 finished rounds next to it.*Restore it"):
        retrain(**given_)
    with pytest.raises(DataError, match="missing"):
        load_champion(tmp_path)
    os.mkfifo(tmp_path / CHAMPION_FILE)
    with pytest.raises(DataError, match="not a regular file"):
        load_champion(tmp_path)


def test_files_of_the_earlier_system_are_identified_by_rows(tmp_path):
    with (
        earlier_system(tmp_path / "a", 20, 0) as a,
        earlier_system(tmp_path / "b", 20, 1) as b,
        earlier_system(tmp_path / "c", 20, 0) as c,
    ):
        assert os.path.getsize(tmp_path / "a") == os.path.getsize(tmp_path / "b")
        assert part_digest(a) == part_digest(c) != part_digest(b)


def test_new_recordings_without_names_are_refused_before_training(tmp_path):
    new, old, testing = (earlier_system(tmp_path / name, 20, k) for k, name in enumerate("not"))
    with new, old, testing, pytest.raises(DataError, match="does not store the paths"):
        retrain(
            fresh(), new, replay=old, testing=testing, out=tmp_path / "rounds", device="cpu", progress=False
        )
    assert os.listdir(tmp_path / "rounds") == []


def test_missing_groups_are_reported_before_training(networks, tmp_path):
    with pytest.raises(UsageError, match="the column to group by does not exist; found 'colour'"):
        retrain(**round_arguments(networks, tmp_path, group="colour"))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_challengers_are_compared_with_the_champion_by_group_bootstrap(networks, tmp_path, monkeypatch):
    given_ = round_arguments(networks, tmp_path)
    by_rule(monkeypatch, True)
    one = retrain(**given_)
    two = retrain(**given_)
    assert two.record["challengers_judged"] == 2
    assert "2 challengers have been compared" in two.reason
    assert "at least one of them is called better by chance would be about 4.9%" in two.reason
    with recordings(networks[1]["testing"], TASK) as ds:
        both = {"champion": one.challenger, "challenger": two.challenger}
        models = {name: (d, score_rows(d, ds)) for name, d in both.items()}
        groups = recording_groups(recordings_of(ds))
        truth = ds.labels == TASK.leak_in_model
        rules = RoundRules(n_draws=200)
        right = compare_models(truth, groups, models, rules)
    assert len(groups) > 5
    assert two.record["metrics"] == {"testing": right.summary}


def test_test_recordings_are_never_trained_on(networks, tmp_path):
    given_ = round_arguments(networks, tmp_path)
    for part in ("new_data", "replay", "validation"):
        with raises("test-set-learned", says="testing"):
            retrain(**given_ | {part: networks[1]["testing"]})
    assert not (tmp_path / CHAMPION_FILE).exists(), "what cannot be is refused before a champion is named"
    with recordings(networks[1]["testing"], TASK) as testing:
        of_a_class = np.flatnonzero(testing.labels == 0)
        given_one = {"testing": Segments(testing.sources, level="recording", rows=of_a_class)}
        with raises("class-missing", says="testing"):
            retrain(**given_ | given_one)
    with recordings(networks[1]["testing"]) as every:
        inside = np.isin(
            np.arange(len(every)), [0, 1, 2, 6, 9]
        )  # some sensors whole, of others one recording
        parts = [
            Segments(every.sources, level="recording", rows=np.flatnonzero(m), preload_to_ram=False)
            for m in (inside, ~inside)
        ]
        assert any("sensor" in s for s in check_overlap({"new recordings": parts[0]}, parts[1]))
        given_ |= {"new_data": parts[0], "testing": parts[1], "settings": replace(SMALL, epochs=1)}
        with pytest.warns(LeakySplitWarning, match="LEAKY SPLIT"):
            stamped = retrain(**given_)
        assert "sensor" in stamped.record["stamps"][0]
        assert "BEWARE" in repr(stamped)
    assert not any(p.name.endswith(".lock") for p in tmp_path.iterdir())


def test_one_round_at_a_time(networks, tmp_path):
    from leakmel.core.files import OutputLock

    with OutputLock(tmp_path / "model.pt"), pytest.raises(OutputError, match="another round"):
        retrain(**round_arguments(networks, tmp_path))


# Interruptions


class Killed(BaseException):
    "What stops a round where it is."


@pytest.fixture(scope="module")
def whole_round(networks, tmp_path_factory) -> Path:
    "The folder of a round that was not interrupted, and whose challenger has won."
    folder = tmp_path_factory.mktemp("whole") / "rounds"
    with pytest.MonkeyPatch.context() as m:
        by_rule(m, True)
        retrain(**round_arguments(networks, folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "class_scores",
        pytest.param("train_epochs", marks=pytest.mark.long),
        "finish_training",
        pytest.param("compare_models", marks=pytest.mark.long),
        pytest.param("write_whole", marks=pytest.mark.long),
        "sealed_json",
        "write_lineage",
    ],
)
def test_interrupted_round_keeps_the_champion_and_is_resumed(
    networks, whole_round, tmp_path, monkeypatch, where
):
    given_ = round_arguments(networks, tmp_path / "torn")
    with monkeypatch.context() as m:
        by_rule(m, True)

        def stop(*a: Any, **k: Any) -> None:
            if where == "write_lineage" and len(a[1].champions) == 1:
                return begin(*a)
            raise Killed

        begin = rounds.files.write_lineage
        m.setattr(next(p for p in (rounds, rounds.files, loop) if hasattr(p, where)), where, stop)
        with pytest.raises(Killed):
            retrain(**given_)
        if where == "class_scores":
            assert read_lineage(tmp_path / "torn") is None, "nothing had begun"
        else:
            assert weights_digest(load_champion(tmp_path / "torn")) == weights_digest(given_["champion"])
    by_rule(monkeypatch, True)
    done = retrain(**given_)
    if (
        where == "write_lineage"
    ):  # the decision had been made: it was carried out, and this was the next round
        assert past(tmp_path / "torn") == [0, 1, 2]
        assert files_of(tmp_path / "torn" / "round-0001") == files_of(whole_round / "round-0001")
        return
    assert weights_digest(done.champion) == weights_digest(load_champion(whole_round))
    assert files_of(tmp_path / "torn") == files_of(whole_round)


KILLED = """
import os, signal, sys
import leakmel as lm
from leakmel.detector.model.settings import settings_from
from leakmel.extras.retrain import RoundRules, retrain
from leakmel.detector.train import loop as training
from leakmel.detector.train.loop import CheckpointSettings
save, n = training.TrainingRun.save, 0
def dying(self):
    global n
    save(self)
    n += 1
    if n == 2: os.kill(os.getpid(), signal.SIGKILL)
training.TrainingRun.save = dying
model, new, old, testing, out = sys.argv[1:]
retrain(model, new, replay=old, testing=testing, out=out, rules=RoundRules(n_draws=200), device="cpu", progress=False,
        settings=settings_from({"epochs": 2, "epoch_share": 0.5, "batch_size": 128, "channels": [4, 8], "seed": 1, "learning_rate": 1e-3}),
        checkpoints=CheckpointSettings(fsync=False, checkpoint_steps=3))
"""


@pytest.mark.slow
def test_killed_round_keeps_the_champion_and_resumes_bit_for_bit(
    networks, whole_round, tmp_path, monkeypatch
):
    given_ = round_arguments(
        networks, tmp_path / "torn", checkpoints=CheckpointSettings(fsync=False, checkpoint_steps=3)
    )
    model = given_["champion"].save(tmp_path / "first.pt")
    words = [
        sys.executable,
        "-c",
        KILLED,
        model,
        given_["new_data"],
        given_["replay"],
        given_["testing"],
        given_["out"],
    ]
    died = subprocess.run(
        words,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        timeout=300,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert weights_digest(load_champion(tmp_path / "torn")) == weights_digest(given_["champion"])
    assert not (tmp_path / "torn/round-0001" / RECORD).exists()
    by_rule(monkeypatch, True)
    done = retrain(**given_)
    assert "Resumes after step 6" in json.loads((done.folder / "summary.json").read_text())["begin"]
    assert files_of(tmp_path / "torn") == files_of(whole_round)


@pytest.mark.slow
def test_other_round_does_not_resume_an_interrupted_one(networks, tmp_path, monkeypatch):
    given_ = round_arguments(networks, tmp_path)
    real = loop.train_epochs

    def half(run: Any, *a: Any) -> None:
        run.save()
        raise Killed

    monkeypatch.setattr(loop, "train_epochs", half)
    with pytest.raises(Killed):
        retrain(**given_)
    monkeypatch.setattr(loop, "train_epochs", real)
    with pytest.raises(UsageError, match="another training, which was interrupted"):
        retrain(**given_ | {"rules": RoundRules(keep_share=0.25, n_draws=200)})
    done = retrain(**given_ | {"rules": RoundRules(keep_share=0.25, n_draws=200), "resume": "never"})
    assert done.number == 1


def test_damaged_folder_is_reported(networks, tmp_path):
    given_ = round_arguments(networks, tmp_path)
    retrain(**given_)
    pointer, model = (tmp_path / CHAMPION_FILE).read_bytes(), champion_file(tmp_path)
    for wrong in (
        b"",
        b"[]",
        b"{}",
        pointer.replace(b"champions 1", b"champions 9"),
        pointer.replace(b'"round": 0', b'"round": "../x"'),
        pointer.replace(b'"round": 0', b'"round": 1' + b"0" * 300),
    ):
        write_whole(tmp_path / CHAMPION_FILE, wrong, sync=False)
        with pytest.raises(DataError, match="name a champion"):
            load_champion(tmp_path)
    write_whole(tmp_path / CHAMPION_FILE, pointer, sync=False)
    write_whole(model, model.read_bytes()[:-1], sync=False)
    with pytest.raises(DataError, match="digest does not match"):
        load_champion(tmp_path)


@each(
    "wrong",
    [
        {},
        {"challenger": None},
        {"challenger": {"round": 1}},
        {"challenger": [1, "a", "b"]},
        {"round": "1"},
        {"round": True},
        {"round": -1},
        {"round": 2},
        {"digest": 5},
        {"weights": None},
        {"more": 1},
    ],
    ids=str,
)
def test_damaged_record_is_reported(tmp_path, wrong):
    "A round decided, and was interrupted before the champion was named."
    lineage = Lineage((save_champion(tmp_path, 0, fresh()),), "the test set")
    write_lineage(tmp_path, lineage)
    own = asdict(save_champion(tmp_path, 1, fresh(1)))
    record = {"replaced": True, "champion": asdict(lineage.current)} | (
        wrong if not wrong or "challenger" in wrong else {"challenger": own | wrong}
    )
    path = round_folder(tmp_path, 1) / RECORD
    write_whole(path, json.dumps(record).encode(), sync=False)
    with raises("not-a-round", path=path):
        finish_interrupted_round(tmp_path)
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        write_whole(path, content, sync=False)
        with raises("not-a-round", path=path, says="the champion before this round stays"):
            finish_interrupted_round(tmp_path)
    assert read_lineage(tmp_path) == lineage
    write_whole(path, json.dumps(record | {"challenger": own}).encode(), sync=False)
    settled = finish_interrupted_round(tmp_path)
    assert settled is not None
    assert settled.current == Champion(**own)


def test_a_loader_that_was_opened_in_place_of_another_is_closed(networks, tmp_path, monkeypatch):
    "As where a checkpoint comes from a machine with less memory."
    closed, real = list[str](), loop.begin_training

    def begin(run: Any, resume: str) -> str:
        output = real(run, resume)
        run.state.close()
        run.state.open("stream")
        loader = run.state.loader

        def close() -> None:
            closed.append(loader.kind)
            type(loader).close(loader)

        loader.close = close
        return output

    def stop(*a: Any) -> None:
        raise Killed

    monkeypatch.setattr(loop, "begin_training", begin)
    monkeypatch.setattr(loop, "train_epochs", stop)
    with pytest.raises(Killed):
        retrain(**round_arguments(networks, tmp_path))
    assert closed == ["stream"]


def test_rules_are_checked():
    cases: list[dict[str, Any]] = [
        {"keep_share": 0.0},
        {"keep_share_human": 1.1},
        {"replay_share": -1.0},
        {"metric": "beauty"},
        {"n_draws": 3},
        {"seed": -1},
        {"keep_share": "half"},
    ]
    for wrong in cases:
        with pytest.raises(UsageError) as error:
            RoundRules(**wrong)
        right = {"beauty": "unknown-value", "half": "wrong-type"}.get(
            next(iter(wrong.values())), "out-of-range"
        )
        assert error.value.code == right
