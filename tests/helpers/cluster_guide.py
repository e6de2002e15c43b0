"Commands of the guide to many machines, for the tests that run them."

import json
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def of_guide(word: str) -> str:
    "The block of the guide that contains a word."
    cells = json.loads((ROOT / "nbs" / "guides" / "cluster.ipynb").read_bytes())["cells"]
    blocks = re.findall(r"```(?:bash|python)\n(.*?)```", "\n".join("".join(c["source"]) for c in cells), re.S)
    (found,) = [b for b in blocks if word in b]
    return str(found)


def certificates(folder: Path) -> dict[str, str]:
    "Make an authority and a certificate, and return the environment of the guide."
    folder.mkdir()
    script = of_guide("openssl req") + of_guide("REQUIRE_ENCRYPTION") + "env -0"
    done = subprocess.run(["bash", "-ec", script], cwd=folder, capture_output=True, check=True)
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "node.pem"]
    subprocess.run(verify, cwd=folder, check=True, capture_output=True)
    values = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line.startswith("DASK_"))
    return os.environ | {"PYTHONPATH": str(ROOT)} | values
