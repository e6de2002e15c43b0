"""The same log-mel file by other tools (torchaudio, librosa, SciPy, DALI), and by C without checks."""

import argparse
import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
from bench_gpu import geometry_spec

from leakmel.core.errors import SpecError
from leakmel.core.monitor import usable_cores
from leakmel.mel.engines import EngineUnavailable
from leakmel.mel.spec import MelSpec, hann_periodic


def list_split(
    root: str | os.PathLike,  # folder of splits
    split: str = "TRAINING",
) -> tuple[list[str], np.ndarray]:  # paths in their order, label numbers [n] int16
    "Recordings of a split and their labels."
    labels = sorted(e.name for e in os.scandir(Path(root, split)) if e.is_dir())
    found = sorted(
        (f"{label}/{e.name}", i)
        for i, label in enumerate(labels)
        for e in os.scandir(Path(root, split, label))
        if e.name.endswith(".wav")
    )
    return [f"{root}/{split}/{path}" for path, _ in found], np.array([i for _, i in found], np.int16)


@dataclass(frozen=True)
class Job:
    "Recordings of one split, and what is to be made of them."

    paths: list[str]
    spec: MelSpec
    cores: int

    @cached_property
    def step(self) -> int:
        "Distance of distinct frames, samples; raises SpecError where it is uneven."
        steps = np.unique(np.diff(self.spec.grid.distinct[0]))
        if len(steps) != 1:
            raise SpecError(
                "frames at uneven steps",
                found=steps.tolist(),
                expected="one step",
                remedy="compare with another geometry",
            )
        return int(steps[0])

    def laid_out(
        self,
        mels: np.ndarray,  # [b, D, M] of distinct frames
    ) -> np.ndarray:  # [b, L, S, M, T]
        "Distinct frames as segments; those that overlap repeat them."
        index = self.spec.grid.distinct[1]
        chosen = mels if index.size == mels.shape[1] else mels[:, index.ravel()]
        return chosen.reshape(len(mels), *index.shape, -1).swapaxes(-1, -2)

    def batches(self, n: int) -> Iterator[tuple[int, list[str]]]:
        "First row and paths of batches of `n` recordings."
        return ((i, self.paths[i : i + n]) for i in range(0, len(self.paths), n))


def _soundfile(path: str) -> np.ndarray:
    return import_module("soundfile").read(path, dtype="float32")[0]


def stock_log_mel(
    job: Job,
) -> Callable[[Any], Any]:  # torch tensors [n, N] float32 -> [n, L, S, M, T] float16
    "Return the transform of leakmel's engine torchaudio, without the engine."
    from leakmel.mel.torch_engine import TorchaudioLogMel

    log_mel = TorchaudioLogMel(job.spec)
    return lambda x: log_mel(x).half()


def fill_batched(job: Job, rows: h5py.Dataset) -> None:
    "soundfile and torchaudio, batch after batch in one process."
    import torch

    log_mel = stock_log_mel(job)
    with torch.inference_mode():
        for i, paths in job.batches(64):
            x = torch.from_numpy(np.stack([_soundfile(p) for p in paths]))
            rows[i : i + len(paths)] = log_mel(x).numpy()


class _Recordings:
    "What a DataLoader's workers take recordings from."

    def __init__(self, job: Job):
        self.paths, self.log_mel = job.paths, stock_log_mel(job)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Any:
        import torch

        with torch.inference_mode():
            return self.log_mel(torch.from_numpy(_soundfile(self.paths[i]))[None])[0]


def fill_loader(job: Job, rows: h5py.Dataset) -> None:
    "soundfile and torchaudio in the workers of a torch DataLoader."
    from torch.utils.data import DataLoader

    i, source = 0, _Recordings(job)
    for mels in DataLoader(source, batch_size=64, num_workers=job.cores):  # type: ignore[arg-type]
        rows[i : i + len(mels)] = mels.numpy()
        i += len(mels)


def fill_read_first(job: Job, rows: h5py.Dataset) -> None:
    "Everything read into memory by threads, then computed by torchaudio, then written."
    import torch

    samples, done, log_mel = (
        np.empty((len(job.paths), job.spec.n_samples), np.float32),
        np.empty(rows.shape, np.float16),
        stock_log_mel(job),
    )

    def read(i: int) -> None:
        samples[i] = _soundfile(job.paths[i])

    with ThreadPoolExecutor(job.cores) as pool:
        list(pool.map(read, range(len(job.paths))))
    with torch.inference_mode():
        for i, paths in job.batches(1024):
            done[i : i + len(paths)] = log_mel(torch.from_numpy(samples[i : i + len(paths)])).numpy()
    rows[...] = done


_own: dict[str, Job] = {}  # of a worker process: handed over once, not with each recording


def librosa_mels(
    job: Job,
    samples: np.ndarray | None = None,  # [N] float32; None: silence
) -> np.ndarray:  # [D, M] float16, dB
    "Decibels of distinct frames by librosa."
    import librosa

    spec = job.spec
    y = np.zeros(spec.n_samples, np.float32) if samples is None else samples
    mels = librosa.feature.melspectrogram(
        y=y,
        sr=spec.sample_rate,
        n_fft=spec.n_fft,
        hop_length=job.step,
        center=False,
        power=spec.power,
        n_mels=spec.n_mels,
        fmin=spec.f_min_hz,
        fmax=spec.top_hz,
        htk=spec.mel_scale == "htk",
        norm=spec.mel_norm,
    )
    return (20 / spec.power * np.log10(np.maximum(mels, spec.floor))).T.astype(np.float16)


def _librosa_row(i: int) -> np.ndarray:
    return librosa_mels(_own["job"], _soundfile(_own["job"].paths[i]))


def fill_librosa(job: Job, rows: h5py.Dataset) -> None:
    "soundfile and librosa, recording by recording in as many processes as cores."
    from multiprocessing import get_context

    with get_context("fork").Pool(job.cores, _own.update, [{"job": job}]) as pool:
        mels = pool.imap(_librosa_row, range(len(job.paths)), chunksize=16)
        for i, paths in job.batches(64):
            rows[i : i + len(paths)] = job.laid_out(np.stack([next(mels) for _ in paths]))
        pool.close()
        pool.join()


def fill_scipy(job: Job, rows: h5py.Dataset) -> None:
    "scipy.io.wavfile, scipy.fft and NumPy in threads."
    import scipy.fft
    from scipy.io import wavfile

    spec = job.spec
    window = (hann_periodic(spec.n_fft) / 32_768).astype(np.float32)  # the scale of 16 bits is in it
    bank = spec.filterbank.astype(np.float32)

    def compute(batch: tuple[int, list[str]]) -> tuple[int, np.ndarray]:
        x = np.stack([wavfile.read(p)[1] for p in batch[1]])
        frames = np.lib.stride_tricks.sliding_window_view(x, spec.n_fft, axis=-1)[:, :: job.step]
        spectrum = scipy.fft.rfft(frames * window)
        power = spectrum.real**2 + spectrum.imag**2
        mels = (power if spec.power == 2 else np.sqrt(power, out=power)) @ bank
        np.log10(np.maximum(mels, np.float32(spec.floor), out=mels), out=mels)
        return batch[0], job.laid_out((mels * np.float32(20 / spec.power)).astype(np.float16))

    with ThreadPoolExecutor(job.cores) as pool:
        for i, done in pool.map(compute, job.batches(32)):
            rows[i : i + len(done)] = done


def fill_dali(job: Job, rows: h5py.Dataset) -> None:
    "CPU operators of NVIDIA DALI in one pipeline."
    dali, spec = import_module("nvidia.dali"), job.spec
    fn, types, window = dali.fn, dali.types, hann_periodic(spec.n_fft).astype(np.float32).tolist()
    pipe = dali.Pipeline(batch_size=32, num_threads=job.cores, device_id=None, prefetch_queue_depth=2)
    with pipe:
        raw, _ = fn.readers.file(files=job.paths, dont_use_mmap=True)  # plain reads cost less for small files
        x, _ = fn.decoders.audio(raw, dtype=types.FLOAT, downmix=True)
        spectrum = fn.spectrogram(
            x,
            nfft=spec.n_fft,
            window_length=spec.n_fft,
            window_step=job.step,
            window_fn=window,
            center_windows=False,
            power=int(spec.power),
            layout="tf",
        )
        mels = fn.mel_filter_bank(
            spectrum,
            sample_rate=float(spec.sample_rate),
            nfilter=spec.n_mels,
            freq_low=spec.f_min_hz,
            freq_high=spec.top_hz,
            mel_formula=spec.mel_scale,
            normalize=spec.mel_norm == "slaney",
        )
        decibels = fn.to_decibels(
            mels,
            multiplier=20 / spec.power,
            reference=1.0,
            cutoff_db=20 / spec.power * float(np.log10(spec.floor)),
        )
        pipe.set_outputs(fn.cast(decibels, dtype=types.FLOAT16))
    pipe.build()
    for i, paths in job.batches(32):
        (done,) = pipe.run()
        rows[i : i + len(paths)] = job.laid_out(
            np.asarray(done.as_array())[: len(paths)]
        )  # the last batch goes on with the first recordings


C_SOURCE = Path(__file__).with_name("limit.c")


_C_FLAGS = ("-O3", "-mavx512f", "-mfma", "-mtune=native", "-shared", "-fPIC", "-pthread")


@cache
def compiled_c() -> ctypes.CDLL:  # raises EngineUnavailable without gcc or AVX-512
    "Compile limit.c, once for each version of it."
    if platform.machine() not in ("x86_64", "AMD64"):
        raise EngineUnavailable("the processor has no AVX-512")
    try:
        key = hashlib.sha256(C_SOURCE.read_bytes() + " ".join(_C_FLAGS).encode()).hexdigest()[:16]
        library = C_SOURCE.parent / "__pycache__" / f"limit-{key}.so"
        if not library.exists():
            library.parent.mkdir(exist_ok=True)
            new = library.with_suffix(f".{os.getpid()}")
            words = ["gcc", *_C_FLAGS, "-o", str(new), str(C_SOURCE), "-lm"]
            done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line or "cannot" in line]
                raise EngineUnavailable(
                    f"gcc does not compile {C_SOURCE.name}: {(lines or ['no reason given'])[0]}"
                )
            os.replace(new, library)
        loaded = ctypes.CDLL(os.fspath(library))
    except OSError as e:
        raise EngineUnavailable(f"{C_SOURCE.name} cannot be compiled or loaded: {e}") from e
    if not loaded.has_avx512():
        raise EngineUnavailable("the processor has no AVX-512")
    return loaded


class _CJob(ctypes.Structure):
    "`Job` of limit.c."

    _fields_ = [
        ("paths", ctypes.POINTER(ctypes.c_char_p)),
        ("n_files", ctypes.c_long),
        ("n_samples", ctypes.c_int),
        ("starts", ctypes.c_void_p),
        ("n_starts", ctypes.c_int),
        ("index", ctypes.c_void_p),
        ("n_frames", ctypes.c_int),
        ("window", ctypes.c_void_p),
        ("bank", ctypes.c_void_p),
        ("floor", ctypes.c_float),
        ("file", ctypes.c_int),
        ("offset", ctypes.c_int64),
    ]


def fill_c(job: Job, rows: h5py.Dataset) -> None:
    "A C program with AVX-512 for such recordings only, without any check."
    spec, (starts, index) = job.spec, (a.astype(np.int32).ravel() for a in job.spec.grid.distinct)
    if (spec.n_fft, spec.n_mels, spec.power, spec.row_shape[-1]) != (512, 64, 2, 1):
        raise EngineUnavailable(f"{C_SOURCE.name} computes frames of 512 samples, 64 bands and power 2 only")
    window = (hann_periodic(spec.n_fft) / 32_768).astype(np.float32)
    bank = np.ascontiguousarray(spec.filterbank, np.float32)
    paths = (ctypes.c_char_p * len(job.paths))(*map(os.fsencode, job.paths))
    rows[-1:] = 0  # gives the rows their place in the file
    rows.file.flush()
    file = os.open(rows.file.filename, os.O_WRONLY)
    try:
        failed = compiled_c().fill(
            ctypes.byref(
                _CJob(
                    paths,
                    len(paths),
                    spec.n_samples,
                    starts.ctypes.data,
                    starts.size,
                    index.ctypes.data,
                    index.size,
                    window.ctypes.data,
                    bank.ctypes.data,
                    spec.floor,
                    file,
                    rows.id.get_offset(),
                )
            ),
            job.cores,
        )
    finally:
        os.close(file)
    if failed:
        raise OSError(failed, os.strerror(failed))


@dataclass(frozen=True)
class Tool:
    "A way to fill the rows of a job."

    fill: Callable[[Job, h5py.Dataset], None]
    modules: tuple[str, ...]  # imported before the clock starts; their versions are told
    # a first call, also before the clock, where imports alone do not load everything
    first: Callable[[Job], object] | None = None
    env: dict[str, str] = field(default_factory=dict)  # of its process


_ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1"
}  # for matrix products, where threads or processes of the tool have the cores already

LIMIT = "C without checks"  # no tool that somebody could use

TOOLS = {
    LIMIT: Tool(fill_c, (), lambda job: compiled_c()),
    "dali": Tool(fill_dali, ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types")),
    "scipy threads": Tool(fill_scipy, ("scipy", "scipy.fft", "scipy.io.wavfile"), env=_ONE_THREAD),
    "torch loader": Tool(fill_loader, ("torch", "torch.utils.data", "soundfile", "torchaudio")),
    "torchaudio": Tool(fill_batched, ("torch", "soundfile", "torchaudio")),
    "read first": Tool(fill_read_first, ("torch", "soundfile", "torchaudio")),
    "librosa": Tool(fill_librosa, ("librosa", "soundfile"), librosa_mels, _ONE_THREAD),
}


def import_modules(
    names: Sequence[str],
) -> dict[str, str]:  # versions by name; raises EngineUnavailable for what is not installed
    "Import the modules of a tool."

    def load(name: str) -> ModuleType:
        if name != "torchaudio":
            return import_module(name)
        from leakmel.mel.torch_engine import import_torchaudio

        return import_torchaudio()

    try:
        loaded = {name: load(name) for name in names}
    except ModuleNotFoundError as e:
        raise EngineUnavailable(str(e)) from e
    return {
        name: str(module.__version__) for name, module in loaded.items() if hasattr(module, "__version__")
    }


def run_tool(
    tool: Tool,
    root: str | os.PathLike,  # folder of splits
    out: str | os.PathLike,  # file to write
    spec: MelSpec,
) -> dict[str, Any]:  # seconds, n_files, versions; raises EngineUnavailable where something is not installed
    "Make the file of the training split."
    versions = import_modules(tool.modules)
    if tool.first is not None:
        tool.first(Job([], spec, 1))
    began = time.perf_counter()
    paths, ids = list_split(root)
    with h5py.File(out, "w") as file:
        file["labels"] = ids
        tool.fill(
            Job(paths, spec, usable_cores()),
            file.create_dataset("segments_mel", (len(paths), *spec.row_shape), np.float16),
        )
    return {
        "seconds": time.perf_counter() - began,
        "n_files": len(paths),
        "versions": versions | {"numpy": np.__version__, "h5py": h5py.__version__},
    }


def main(argv: Sequence[str] | None = None) -> int:
    "Run one contestant and print its figures as JSON, or what it needs and lacks."
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("name", choices=TOOLS)
    parser.add_argument("root")
    parser.add_argument("out")
    parser.add_argument("--geometry", default="A", choices=["A", "B"])
    args = parser.parse_args(argv)
    try:
        print(json.dumps(run_tool(TOOLS[args.name], args.root, args.out, geometry_spec(args.geometry))))
    except EngineUnavailable as e:
        print(json.dumps({"missing": str(e)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
