"Processors whose rows differ in a bit: their engines have different identities and probes, and no data set mixes their rows."

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from errors import raises
from fake_device import FakeDevice
from independent import leftovers

import leakmel as lm
from leakmel.core.errors import EngineError
from leakmel.dataset.pipeline import engine_probe
from leakmel.mel.cpu_engine import CpuEngine
from leakmel.mel.engines import open_engine
from leakmel.mel.spec import MelSpec
from leakmel.mel.torch_engine import TorchEngine
from leakmel.recordings.demo import write_wav

WITH_FMA = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}
WITHOUT_FMA = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""}

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64")
    or " fma " not in Path("/proc/cpuinfo").read_text(encoding="utf-8"),
    reason="compiles for x86 processors with and without FMA",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    "Run a program on a processor; the compiled code of each is kept."
    cache = tmp_path_factory.mktemp("numba")

    def on(processor: dict[str, str], program: str, *words: object) -> subprocess.CompletedProcess:
        kept = {"NUMBA_CACHE_DIR": str(cache)} if processor else {}  # this one's has been compiled before
        return subprocess.run(
            [sys.executable, "-c", program, *map(str, words)],
            env=os.environ | processor | kept | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=True,
        )

    return on


# ---- identities and probes

PROBE = """
from leakmel.dataset.pipeline import engine_probe
from leakmel.mel.engines import open_engine
from leakmel.mel.spec import MelSpec
import sys
for name in sys.argv[1:]:
    with open_engine(name, MelSpec(), device="cpu") as engine: print(engine.identity, engine_probe(engine))
"""


@pytest.fixture(scope="module")
def probes(run) -> list[dict[str, list[str]]]:
    "Identity and probe of each engine: here, in another process by AVX2, and in one without FMA in which MKL takes its plainest code."
    here = dict[str, list[str]]()
    for name in ("cpu", "torch", "torchaudio"):
        with open_engine(name, MelSpec(), device="cpu") as engine:
            here[name] = [engine.identity, engine_probe(engine)]

    def in_a_child(processor: dict[str, str], *names: str) -> dict[str, list[str]]:
        lines = run(processor, PROBE, *names).stdout.splitlines()
        return {name: line.split() for name, line in zip(names, lines, strict=True)}

    return [
        here,
        in_a_child(WITH_FMA, *here),
        in_a_child(WITHOUT_FMA | {"MKL_CBWR": "COMPATIBLE"}, "cpu", "torch"),
    ]


@pytest.mark.slow
def test_identities_and_probes_of_the_cpu_engine(probes: list[dict[str, list[str]]]) -> None:
    here, again, without = (found["cpu"] for found in probes)
    assert here[0] == "cpu@2/cpu"
    assert again == here, "equal in another process and with AVX2"
    assert without[0] == "cpu@2/cpu-without-fma"
    assert without[1] != here[1]


def test_the_probe_tells_bits_and_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with CpuEngine(MelSpec()) as engine, CpuEngine(MelSpec(n_mels=32)) as other:
        here = engine_probe(engine)
        assert engine_probe(other) != here
        real = engine.run

        def one_bit(samples: np.ndarray, out: np.ndarray) -> np.ndarray:
            moments = real(samples, out)
            out.view(np.uint32)[0, 0, 0, 0, 0] ^= 1
            return moments

        with monkeypatch.context() as m:
            m.setattr(engine, "run", one_bit)
            assert engine_probe(engine) != here
        for place in ("h5py.version.hdf5_version", "soundfile.__libsndfile_version__", "leakmel.__version__"):
            with monkeypatch.context() as m:
                m.setattr(place, "0")
                assert engine_probe(engine) != here, place
        assert engine_probe(engine) == here


@pytest.mark.slow
def test_identities_of_the_torch_engine(probes: list[dict[str, list[str]]]) -> None:
    "MKL and NumPy choose their code by the processor."
    here, again, other = probes
    assert here["torch"][0].startswith("torch@3/cpu-")
    assert here["torchaudio"][0].startswith("torchaudio@1/cpu-")
    assert again == here
    assert other["torch"][0] != here["torch"][0]
    assert other["torch"][1] != here["torch"][1]


def test_identity_of_a_card() -> None:
    "Compute capability decides the order of sums; cards that differ are not used together."
    spec = MelSpec.preset("disjoint", duration_s=1)

    class Card(FakeDevice):
        def __init__(self, name: str, capability: str):
            super().__init__(name)
            self.processor = capability

    with TorchEngine(spec, device=[Card("fake:0", "9.0"), Card("fake:1", "9.0")]) as engine:
        assert engine.identity == "torch@3/fake-9.0"
    with raises("devices-differ", EngineError, says="8.0 and 9.0"):
        TorchEngine(spec, device=[Card("fake:0", "9.0"), Card("fake:1", "8.0")])


# ---- rows

ROWS = """
import json
import numpy as np
from leakmel.mel.cpu_engine import LANES, CpuEngine
from leakmel.mel.engines import check_recording
from leakmel.mel.spec import MelSpec, compare, reference_features
ok, rows = [], []
for changes in ({}, {"n_fft": 128, "hop_length": 32, "n_mels": 16}, {"n_fft": 256, "hop_length": 100, "n_mels": 17}):
    for preset in ("disjoint", "overlap"):
        spec = MelSpec.preset(preset, duration_s=1.5, **changes)
        out = np.full((1, *spec.row_shape), np.nan, np.float16)
        x = check_recording(spec)
        with CpuEngine(spec) as engine: engine.run(x, out)
        ok.append(compare(out, reference_features(x, spec), spec).ok)
        rows.append(out.tobytes().hex())
print(json.dumps({"lanes": LANES, "ok": ok, "rows": rows}))
"""


@pytest.mark.slow
def test_rows_of_processors_without_avx512_and_without_fma(run) -> None:
    "Lanes change no bit; only where a product and a sum are rounded once or twice do processors differ, and all are right."
    here, avx2, sse = (json.loads(run(processor, ROWS).stdout) for processor in ({}, WITH_FMA, WITHOUT_FMA))
    assert avx2["lanes"] == sse["lanes"] == 8
    assert len(here["ok"]) == 6
    assert all(here["ok"] + avx2["ok"] + sse["ok"])
    assert here["rows"] == avx2["rows"]


# ---- data sets

BUILD = """
import sys
import leakmel as lm
from leakmel.dataset import publish
data, out, stop = sys.argv[1:]
if stop == "stop":
    def interrupted(*args, **named): raise KeyboardInterrupt
    publish.check_data_set = interrupted
try:
    r = lm.build(data, out=out, engine="cpu", progress="none")
    print(r.summary["engine"], r.summary["kept_rows"], r.summary["resumed_rows"], r.rows)
except KeyboardInterrupt:
    assert stop
"""


@pytest.fixture(scope="module")
def noises(tmp_path_factory: pytest.TempPathFactory) -> Path:
    "40 recordings, of which about a third has a row that depends on FMA."
    root, rng = tmp_path_factory.mktemp("noises"), np.random.default_rng(1)
    (root / "LEAK").mkdir()
    spec = MelSpec()
    for k in range(40):
        x = rng.normal(0, 10 ** rng.uniform(0, 4), spec.n_samples)
        write_wav(root / "LEAK" / f"{k}.wav", np.clip(x, -32_768, 32_767).astype(np.int16), spec.sample_rate)
    return root


PROCESSORS = {"cpu@2/cpu": WITH_FMA, "cpu@2/cpu-without-fma": WITHOUT_FMA}


@pytest.fixture(scope="module")
def right(run, noises: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    "The data sets of the processors, built from nothing."
    made, mels = dict[str, bytes](), list[np.ndarray]()
    for identity, processor in PROCESSORS.items():
        target = tmp_path_factory.mktemp("right") / "x.h5"
        assert run(processor, BUILD, noises, target, "").stdout.split() == [identity, "0", "0", "40"]
        made[identity] = target.read_bytes()
        with lm.open_dataset(target) as ds:
            mels.append(ds.mels[:])
    assert not np.array_equal(mels[0], mels[1]), "the recordings do not tell the processors apart"
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "stop"),
    [
        pytest.param(0, 1, "", id="then without FMA-update"),
        pytest.param(1, 0, "stop", id="then with FMA-interrupted"),
        pytest.param(0, 1, "stop", id="then without FMA-interrupted", marks=pytest.mark.long),
        pytest.param(1, 0, "", id="then with FMA-update", marks=pytest.mark.long),
    ],
)
def test_rows_of_another_processor_are_computed_again(
    run, noises: Path, right: dict[str, bytes], tmp_path: Path, first: int, then: int, stop: str
) -> None:
    "A data set is updated, or an interrupted build continued, where the bits are others."
    target, names = tmp_path / "out" / "x.h5", list(PROCESSORS)
    run(PROCESSORS[names[first]], BUILD, noises, target, stop)
    assert (".x.h5.journal" in leftovers(target.parent)) == bool(stop)
    done = run(PROCESSORS[names[then]], BUILD, noises, target, "")
    assert done.stdout.split() == [names[then], "0", "0", "40"]
    assert "all rows are computed again" in done.stderr
    if not stop:
        assert names[first] in done.stderr
    assert target.read_bytes() == right[names[then]]
    assert leftovers(target.parent, "x.h5", "x.h5.report.json", "x.h5.timeline.json") == []


@pytest.mark.slow
def test_processors_with_the_same_bits_update_each_others_data_sets(
    run, noises: Path, tmp_path: Path
) -> None:
    target = tmp_path / "x.h5"
    run(WITH_FMA, BUILD, noises, target, "")
    assert run({}, BUILD, noises, target, "").stdout.split()[:2] == ["cpu@2/cpu", "40"]
