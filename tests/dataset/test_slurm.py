"A data set built by a Slurm array and joined by a job that depends on it: the scripts of the guide, on a Slurm of this machine."

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_guide import certificates, of_guide

import leakmel as lm
from leakmel.dataset.pipeline import finished_parts, parts_folder
from leakmel.recordings.demo import write_demo

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))) or os.geteuid() != 0,
        reason="Slurm is not installed (Debian: slurmctld slurmd slurm-client munge), or the user is not root",
    ),
]
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
MinJobAge=600
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    "Environment in which sbatch reaches a Slurm of this machine."
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    host = socket.gethostname().split(".")[0]
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, ports=[free_port(), free_port()]))
    env = os.environ | {"SLURM_CONF": str(conf), "PYTHONPATH": str(ROOT)}
    munge = ["--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    started = []
    try:
        for command in (["munged", *munge], ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = (folder / f"{command[0]}.log").open("w")
            started.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
            log.close()
            time.sleep(1)
        end = time.monotonic() + 30
        while "idle" not in subprocess.run(["sinfo", "-h"], env=env, capture_output=True, text=True).stdout:
            assert time.monotonic() < end, "".join(p.read_text() for p in folder.glob("*.log"))
            time.sleep(0.5)
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(20)


def submit(env: dict[str, str], folder: Path, *arguments: str, script: str) -> str:
    "Submit a script, and return the number of the job."
    file = folder / f"job{len(list(folder.glob('job*')))}.sh"
    file.write_text(script)
    given = ["sbatch", "--parsable", f"--chdir={folder}", *arguments, str(file)]
    done = subprocess.run(given, env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def wait_for_jobs(env: dict[str, str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True).stdout.strip():
        assert time.monotonic() < end
        time.sleep(0.5)


COMMAND = f"{sys.executable} -m leakmel"
PART = f"""#!/bin/sh
exec {COMMAND} build demo --split training --out x.h5 --engine cpu --quiet --part $SLURM_ARRAY_TASK_ID/4
"""
JOIN = f"#!/bin/sh\nexec {COMMAND} join x.h5 --quiet\n"


def test_array_and_join(slurm, tmp_path):
    write_demo(tmp_path / "demo", n_files=120, faults=True)
    right = lm.build(
        tmp_path / "demo", split="training", out=tmp_path / "y.h5", engine="cpu", progress="none"
    )
    array = submit(slurm, tmp_path, "--array=1-4", "--cpus-per-task=1", script=PART)
    submit(slurm, tmp_path, f"--dependency=afterok:{array}", script=JOIN)
    wait_for_jobs(slurm)
    assert (tmp_path / "x.h5").read_bytes() == right.path.read_bytes()
    assert not parts_folder(tmp_path / "x.h5").exists()


@pytest.mark.parametrize("how", ["killed", "cancelled"])
def test_elements_that_end_are_submitted_again(slurm, tmp_path, how):
    "One element is killed, or the array is cancelled; a join names the missing parts; the same elements again, then the join."
    write_demo(tmp_path / "demo", n_files=120)
    right = lm.build(
        tmp_path / "demo", split="training", out=tmp_path / "y.h5", engine="cpu", progress="none"
    )
    before = (
        "[ $SLURM_ARRAY_TASK_ID = 3 ] && kill -9 $$"
        if how == "killed"
        else "[ $SLURM_ARRAY_TASK_ID -ge 3 ] && sleep 600"
    )
    job = submit(
        slurm, tmp_path, "--array=1-4", "--cpus-per-task=1", script=PART.replace("exec ", f"{before}\nexec ")
    )
    if how == "cancelled":
        end = time.monotonic() + 60
        while len(finished_parts(parts_folder(tmp_path / "x.h5"), 4)) < 2:
            assert time.monotonic() < end
            time.sleep(0.2)
        subprocess.run(["scancel", job], env=slurm, check=True)
    wait_for_jobs(slurm)
    submit(slurm, tmp_path, script=JOIN)
    wait_for_jobs(slurm)
    said = "".join(p.read_text() for p in tmp_path.glob("slurm-*.out"))
    assert re.search(r"missing: 3/4" + (", 4/4" if how == "cancelled" else ""), said)
    assert not (tmp_path / "x.h5").exists()
    again = submit(slurm, tmp_path, "--array=3-4", "--cpus-per-task=1", script=PART)
    submit(slurm, tmp_path, f"--dependency=afterok:{again}", script=JOIN)
    wait_for_jobs(slurm)
    assert (tmp_path / "x.h5").read_bytes() == right.path.read_bytes()


def test_papermill_in_an_array(slurm, tmp_path):
    write_demo(tmp_path / "demo", n_files=60)
    right = lm.build(
        tmp_path / "demo", split="training", out=tmp_path / "y.h5", engine="cpu", progress="none"
    )
    shutil.copy(ROOT / "nbs" / "build_part.ipynb", tmp_path)
    given = f"-p data_root {tmp_path}/demo -p split training -p out {tmp_path}/x.h5 -p engine cpu"
    run = f"{sys.executable} -m papermill build_part.ipynb"
    part = f"#!/bin/sh\nexec {run} part-$SLURM_ARRAY_TASK_ID.ipynb {given} -p part $SLURM_ARRAY_TASK_ID/3\n"
    join = f"#!/bin/sh\nexec {run} join.ipynb {given} -p part join\n"
    array = submit(slurm, tmp_path, "--array=1-3", "--cpus-per-task=1", script=part)
    submit(slurm, tmp_path, f"--dependency=afterok:{array}", script=join)
    wait_for_jobs(slurm)
    assert (tmp_path / "x.h5").read_bytes() == right.path.read_bytes()


def test_signal_of_the_time_limit_ends_an_element(slurm, tmp_path):
    "SIGTERM, as Slurm sends it at the time limit, ends the build with status 143; nothing is joined of it."
    write_demo(tmp_path / "demo", n_files=60)
    command = [
        *COMMAND.split(),
        "build",
        "demo",
        "--split",
        "training",
        "--out",
        "x.h5",
        "--part",
        "1/2",
        "--quiet",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, env=slurm)
    while not (tmp_path / ".x.h5.parts").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, 143)


# The script of the guide, on this machine: its Slurm does not count memory, and parts are small.
HERE = """options = {"cores": 1, "memory": "2GB", "interface": "lo", "job_directives_skip": ["--mem"]}
options |= {"python": sys.executable, "scheduler_options": {"dashboard_address": "127.0.0.1:0"}}
parts.PART_SIZE = 1000
"""
RESULT = (
    """print(made.summary["parts"], len({s.lane for s in made.timeline.spans if "/worker-" in s.lane}))"""
)


def script_of_guide() -> str:
    "Return the head of the guide with options for this machine."
    text = of_guide("SLURMCluster")
    text = re.sub(r"options = \{.*\}\n", lambda m: HERE, text, count=1)
    for old, new in {
        "jobs=16": "jobs=2",
        "wait_for_workers(1)": "wait_for_workers(2, timeout=90)",
        '"recordings"': '"demo"',
        '"training.h5"': '"x.h5"',
        "print(made)": RESULT,
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    return "import sys\nfrom leakmel.dataset import pipeline as parts\n" + text


@pytest.mark.parametrize("cancel", [False, True])
def test_dask_jobqueue(slurm, tmp_path, cancel):
    "Two jobs of Slurm are workers of Dask; also where one of them is cancelled while parts are built."
    pytest.importorskip("dask_jobqueue")
    write_demo(tmp_path / "demo", n_files=300)
    for path in list((tmp_path / "demo" / "TRAINING").rglob("*.wav")):
        for k in range(40):
            os.link(path, path.with_name(f"H{k}{path.name}"))
    right = lm.build(
        tmp_path / "demo", split="training", out=tmp_path / "y.h5", engine="cpu", progress="none"
    )
    certificates(tmp_path / "keys")
    for path in (tmp_path / "keys").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "head.py").write_text(script_of_guide())
    head = subprocess.Popen(
        [sys.executable, "head.py"],
        cwd=tmp_path,
        env=slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if cancel:
            folder, end = parts_folder(tmp_path / "x.h5"), time.monotonic() + 120
            while not list(folder.glob("*.h5")):
                assert head.poll() is None, head.communicate()
                assert time.monotonic() < end
                time.sleep(0.01)
            jobs = subprocess.run(
                ["squeue", "-h", "-o", "%i"], env=slurm, capture_output=True, text=True, check=True
            )
            assert len(jobs.stdout.split()) == 2
            subprocess.run(["scancel", jobs.stdout.split()[0]], env=slurm, check=True)
        out, error = head.communicate(timeout=180)
    finally:
        head.kill()
    assert head.returncode == 0, error
    assert (tmp_path / "x.h5").read_bytes() == right.path.read_bytes()
    n_parts, n_workers = map(int, out.split())
    assert n_parts >= 5
    assert cancel or n_workers == 2
    wait_for_jobs(slurm)
