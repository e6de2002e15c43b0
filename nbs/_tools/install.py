"""Install leakmel with an extra into this environment, from this folder; the size is printed before.

    python nbs/_tools/install.py cpu learn

`cpu` takes torch from the index of builds without CUDA, if that can be reached; `cuda` takes it from the usual index.
"""

import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[2]
BASE_MB = 394  # the base installation
CUDA_MB = 2_500  # what torch with CUDA has more


def parts_of(extra: str) -> set[str]:
    "Return the names of an extra and of the extras that it brings."
    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    found = {extra}
    for line in parser["DEFAULT"][f"{extra}_requirements"].split():
        if line.startswith("leakmel["):
            for name in line[len("leakmel[") : -1].split(","):
                found |= parts_of(name)
    return found


def can_reach(url: str) -> bool:
    "Return whether an address answers within a few seconds."
    try:
        with urlopen(f"{url}/torch/", timeout=5):
            return True
    except (OSError, URLError, ValueError):
        return False


def is_without_cuda() -> bool:
    "Return whether a torch is installed that cannot use CUDA, which pip would keep."
    try:
        return "+cpu" in version("torch")
    except PackageNotFoundError:
        return False


def quiet_kernels() -> None:
    "Keep the kernels of this environment from a warning that they are reached without encryption: they listen on this machine only."
    folder = Path(sys.prefix) / "etc" / "ipython"
    folder.mkdir(parents=True, exist_ok=True)
    text = '{"IPKernelApp": {"log_level": 40}}\n'
    (folder / "ipython_kernel_config.json").write_text(text, encoding="utf-8")


def name_make_docs(folder: Path) -> None:
    "Replace nbdev's commands for a site of Quarto, which they would install as root, by a line that names ours."
    text = f"#!{sys.executable}\nraise SystemExit('The site is built by: make docs')\n"
    for path in (folder / "nbdev_docs", folder / "nbdev_preview"):
        if path.exists():
            path.write_text(text, encoding="utf-8")


def main() -> int:
    "Install; the exit status is that of pip."
    torch, extra = sys.argv[1:]
    if torch not in ("cpu", "cuda"):
        print(f"make: TORCH is cpu or cuda, not {torch!r}", file=sys.stderr)
        return 2
    # errors.py imports nothing that is not in the standard library; the package itself is not installed yet
    sys.path.insert(0, str(ROOT))
    from leakmel.core.errors import CPU_WHEELS, EXTRA_MB

    parts = parts_of(extra)
    megabytes = BASE_MB + sum(EXTRA_MB.get(name, 0) for name in parts)
    if "learn" in parts and torch == "cuda" and is_without_cuda():
        subprocess.run(
            [sys.executable, "-m", "pip", "uninstall", "--yes", "torch", "torchaudio"], check=False
        )
    options = []
    if "learn" in parts and torch == "cpu" and can_reach(CPU_WHEELS):
        options = ["--extra-index-url", CPU_WHEELS]
    elif "learn" in parts:
        megabytes += CUDA_MB
    print(
        f"installing leakmel[{extra}] into .venv: at most {megabytes / 1000:.1f} GB, a few minutes the first time",
        flush=True,
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *options,
        "-e",
        f".[{extra}]",
    ]
    status = subprocess.run(pip, cwd=ROOT, check=False).returncode
    if not status:
        quiet_kernels()
        name_make_docs(Path(sys.executable).parent)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
