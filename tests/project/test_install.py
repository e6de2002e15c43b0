"The base installation: it builds, verifies and reads data sets without torch, plotly and Jupyter."

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from leakmel.cli import OPERATIONS, _parse

pytestmark = pytest.mark.site

ROOT = Path(__file__).resolve().parents[2]
# parts of the extras; none of them may be needed or loaded by a build
EXTRA_MODULES = ("torch", "torchaudio", "plotly", "IPython", "ipywidgets", "papermill", "optuna", "triton")
N_FILES = 60
SESSION = f"""
import hashlib, json, sys
import leakmel as lm
from leakmel.recordings.{"{demo}"} import write_demo

write_demo("demo", n_files={N_FILES})
results = lm.build_all("demo", out_dir="mels", progress="none")
checked = [bool(lm.verify(r.path, root=f"demo/{{r.path.name.split('_')[0]}}").ok) for r in results]
made = lm.open_dataset(results[0].path)
row, label = made[0]
try:
    lm.train
    missing = ""
except ImportError as e:
    missing = str(e)
loaded = [name for name in {EXTRA_MODULES!r} if name in sys.modules]
content = hashlib.sha256(b"".join(bytes(x) for x, _ in made)).hexdigest()
found = dict(rows=sum(r.rows for r in results), checked=checked, shape=row.shape, missing=missing, loaded=loaded)
print(json.dumps(found | dict(python=sys.version_info[:2], content=content)))
"""


def demo_module() -> str:
    "Module that `lm.write_demo` comes from."
    import leakmel

    return leakmel._PUBLIC["write_demo"].rpartition(".")[2]


def session(python: Path | str, folder: Path, env: dict[str, str]) -> dict:
    "What a build of some recordings, its verification and the first row say in a process of their own."
    code = SESSION.replace("{demo}", demo_module())
    done = subprocess.run(
        [python, "-W", "error", "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def clean_env(folder: Path) -> dict[str, str]:
    return {
        k: v for k, v in os.environ.items() if not k.startswith(("LEAKMEL_", "PYTHON", "PIP_", "VIRTUAL_"))
    } | {"HOME": str(folder)}


def test_a_build_loads_nothing_of_the_extras(tmp_path):
    "Where all is installed, too."
    env = clean_env(tmp_path) | {"PYTHONPATH": str(ROOT)}
    code = SESSION.replace("{demo}", demo_module()).replace("    lm.train\n", "    raise ImportError\n")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rows"], found["loaded"]) == (N_FILES, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "version", ["", *(pytest.param(x, marks=pytest.mark.long) for x in ("3.12", "3.13"))]
)
def test_the_base_installation_builds_verifies_and_reads(tmp_path, version):
    """In a new environment with nothing but the requirements of settings.ini; commands that need an extra name it.

    In other versions of Python, too, with the same data set. An editable installation then takes the place of the other.
    """
    interpreter = shutil.which(f"python{version}") if version else sys.executable
    if interpreter is None:
        pytest.skip(f"python{version} is not there")
    source = tmp_path / "source"
    for name in ("settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "leakmel", source / "leakmel", ignore=shutil.ignore_patterns("__pycache__"))
    env = clean_env(Path.home())  # pip's settings and cache are those of the user
    venv = [interpreter, "-m", "venv", "--without-pip", tmp_path / "venv"]
    subprocess.run(venv, env=env, check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    pip_install = [*pip, "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    done = subprocess.run([*pip_install, source], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not [name for name in EXTRA_MODULES if list((tmp_path / "venv").rglob(f"site-packages/{name}"))]
    work = tmp_path / "work"
    work.mkdir()
    found = session(python, work, clean_env(tmp_path))
    assert (found["rows"], found["shape"], found["loaded"]) == (N_FILES, [40, 2, 64, 1], [])
    assert found["checked"] == [True] * 3
    assert "/source[learn]" in found["missing"], "as it was installed: from this folder"
    command = [python.with_name("leakmel"), "train", "mels", "--out", "run", "--json"]
    done = subprocess.run(
        command, cwd=work, env=clean_env(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == "missing-package"
    assert "Traceback" not in done.stderr
    helped = subprocess.run(
        [python, "-c", HELP], cwd=work, env=clean_env(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert helped.stdout.split()[-1] == str(len(OPERATIONS)), "each command has its help without the extras"
    assert helped.stderr.count("\n") == helped.stderr.count("is now"), (
        "old names say the new one, and nothing else is said"
    )
    own = session(sys.executable, tmp_path, clean_env(tmp_path) | {"PYTHONPATH": str(ROOT)})
    assert found["python"] == [
        int(x) for x in (version or f"{sys.version_info[0]}.{sys.version_info[1]}").split(".")
    ]
    assert found["content"] == own["content"]
    done = subprocess.run([*pip_install, "-e", source], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    left = [*(tmp_path / "venv").rglob("site-packages/leakmel/__pycache__/leakmel*.o")]
    assert left, "the compiled code of the first installation, which hid the package of an editable one"
    shutil.rmtree(work / "demo")
    shutil.rmtree(work / "mels")
    assert session(python, work, clean_env(tmp_path))["rows"] == N_FILES


HELP = """
from leakmel.cli import OPERATIONS, main

shown = 0
for command in OPERATIONS:
    try:
        main([command, "--help-all"])
    except SystemExit as e:
        shown += not e.code
print(shown)
"""
WRONG_CALLS = """import leakmel as lm

made: lm.BuildResult = lm.build("x", split="training", check=None)
lm.build("x", splitt="training")
lm.build("x", check="many")
lm.biuld("x")
lm.train("x.h5", out="y", device=3)
lm.MelSpec(n_mels="64")
lm.predict("x", "model").tabel
"""


@pytest.mark.slow
def test_type_checkers_know_the_public_names_and_help_shows_parameters(tmp_path):
    "Wrong calls are errors for mypy where leakmel is only imported, and `help` prints the comment of each parameter."
    (tmp_path / "calls.py").write_text(WRONG_CALLS)
    (tmp_path / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".mypy_cache" / "calls", "calls.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    found = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert found == [4, 5, 6, 7, 8, 9], done.stdout
    import leakmel as lm

    for name in lm._PUBLIC:
        if not inspect.isclass(value := getattr(lm, name)):
            own = [n for n in inspect.signature(value).parameters if f"\n{n}\n    " not in value.__doc__]
            assert own == [], f"help(lm.{name}) does not explain {own}"


# distribution -> its module, where the names differ
MODULES = {"dask-jobqueue": "dask_jobqueue", "nvidia-ml-py": "pynvml", "scikit-learn": "sklearn"}
# what people, make and other programs run or load by themselves, and bounds of what another package installs
NOT_IMPORTED = {
    "jupyterlab": "opens the run notebooks",
    "papermill": "runs the run notebooks from a shell",
    "ipykernel": "the kernel that the run notebooks name",
    "execnb": "a bound: nbdev 2.4 runs cells with it, and names none",
    "pytest-xdist": "make test: -n",
    "ruff": "make test",
    "mypy": "make test",
    "pandas-stubs": "types for mypy",
    "types-psutil": "types for mypy",
    "sphinx": "make docs",
    "myst-nb": "make docs",
    "pydata-sphinx-theme": "make docs",
    "sphinx-copybutton": "make docs",
    "sphinx-design": "make docs",
    "kaleido": "plotly writes the pictures of the front page with it",
}


def is_imported(module: str, text: str) -> bool:
    "Whether some code, or a notebook, imports a module, or asks for it by name."
    asked = rf"(?:import_module|require_package|importorskip)\(\\?[\"']{module}\b"
    return bool(re.search(rf"\b(?:import|from)\s+(?:\w+,\s*)*{module}\b|{asked}", text))


def test_no_package_is_demanded_that_nothing_imports():
    "An extra for users by the package or a notebook; the tools of developers by tests and scripts too."
    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    users = [*ROOT.glob("leakmel/**/*.py"), *ROOT.glob("nbs/**/*.ipynb")]
    developers = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("nbs/**/*.py")]
    of_users, of_developers = (
        "\n".join(p.read_text(encoding="utf-8") for p in paths) for paths in (users, developers)
    )
    unused, named = [], set()
    for key in (k for k in parser["DEFAULT"] if k.endswith("requirements")):
        text = of_users + of_developers if key == "dev_requirements" else of_users
        for line in parser["DEFAULT"][key].split():
            name = re.match(r"[\w.-]+", line)[0]  # type: ignore[index]
            named.add(name)
            if name not in NOT_IMPORTED and not is_imported(MODULES.get(name, name), text):
                unused.append(f"{key}: {name}")
    assert unused == []
    assert set(NOT_IMPORTED) | set(MODULES) <= named


PAGE = ROOT / "nbs" / "explanations" / "troubleshooting.ipynb"


def test_make_installs_torch_without_cuda_where_it_can(monkeypatch, capsys):
    "The sizes are those of the page on installation, and are printed before pip begins."
    import install

    from leakmel.core.errors import CPU_WHEELS, EXTRA_MB

    table = re.findall(
        r"\| `?(\w+)`? \| \d+ \| ([\d,]+) \|",
        PAGE.read_text(encoding="utf-8").partition("What each extra adds")[2].partition("\n  }")[0],
    )
    sizes = {name: int(text.replace(",", "")) for name, text in table}
    assert sizes == {"none": install.BASE_MB} | EXTRA_MB

    def installed(torch: str, extra: str, is_there: bool) -> tuple[list[str], str]:
        given: list[list[str]] = []

        def run(words: list[str], **how: object) -> subprocess.CompletedProcess:
            given.append(words)
            return subprocess.CompletedProcess(words, 0)

        with monkeypatch.context() as m:
            m.setattr(install, "is_without_cuda", lambda: False)
            m.setattr(sys, "argv", ["install.py", torch, extra])
            m.setattr(install, "can_reach", lambda url: is_there)
            m.setattr(install.subprocess, "run", run)
            m.setattr(install, "quiet_kernels", lambda: None)
            m.setattr(install, "name_make_docs", lambda folder: None)
            assert install.main() == (0 if torch in ("cpu", "cuda") else 2)
        return given[0] if given else [], "".join(capsys.readouterr())

    words, text = installed("cpu", "all", True)
    assert words[-4:] == ["--extra-index-url", CPU_WHEELS, "-e", ".[all]"]
    assert "at most 2.2 GB" in text
    for torch, is_there in (("cpu", False), ("cuda", True)):
        words, text = installed(torch, "learn", is_there)
        assert CPU_WHEELS not in words
        assert "at most 4.0 GB" in text
    words, text = installed("cpu", "notebook", True)
    assert CPU_WHEELS not in words
    assert "at most 0.7 GB" in text
    assert installed("gpu", "learn", True) == ([], "make: TORCH is cpu or cuda, not 'gpu'\n")
    # the image installs so too, from what its context holds, and runs without the rights of root
    image = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^(?:FROM|USER|ENTRYPOINT) .*", image, re.M) == [
        "FROM python:3.11-slim",
        "USER leakmel",
        'ENTRYPOINT ["leakmel"]',
    ]
    assert re.search(r"nbs/_tools/install\.py (cpu) (learn)", image)
    left = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert not {"leakmel", "nbs", "setup.py", "settings.ini", "pyproject.toml", "README.md"} & set(left)
    example = re.search(r"leakmel \\\n#\s+(nightly .+)", image)
    assert example is not None
    assert _parse(example[1].split()).command == "nightly"


@pytest.mark.long  # it downloads more than 1 GB
def test_the_image_is_built():
    if not shutil.which("docker") or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("no docker daemon")
    subprocess.run(["docker", "build", "--quiet", "--tag", "leakmel-test", "."], cwd=ROOT, check=True)
    subprocess.run(["docker", "run", "--rm", "leakmel-test", "machine", "doctor"], check=True)
