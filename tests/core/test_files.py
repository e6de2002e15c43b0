"Files that are replaced: what an error names."

import errno
import json
import os
import shlex
from pathlib import Path
from unittest import mock

import h5py
import pytest
from errors import raises

from leakmel.core.errors import MachineError, OutputError, install_command
from leakmel.core.files import replacing
from leakmel.dataset.reader import requested_spec


def test_an_error_names_the_path_of_the_user(tmp_path: Path) -> None:
    "Not the temporary file beside it; a file that the body writes elsewhere keeps its name; a remedy, its installation."
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", tmp_path / "missing" / "x"):
        with raises("write-failed", OutputError, path=target), replacing(target) as new:
            new.write_text("text")
    with raises("write-failed", OutputError, path=tmp_path / "other" / "y"), replacing(tmp_path / "x"):
        (tmp_path / "other" / "y").write_text("text")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    address = "https://example.org/leakmel.git"
    origin = {"url": address, "vcs_info": {"vcs": "git", "commit_id": "1234abcd"}}
    with mock.patch("importlib.metadata.distribution") as found:
        found.return_value.read_text.return_value = json.dumps(origin)
        command = shlex.split(install_command("learn"))
    assert command[-1] == f"leakmel[learn] @ git+{address}@1234abcd"


def test_a_spec_in_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    fault = OSError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
    with mock.patch.object(h5py, "is_hdf5", side_effect=fault), pytest.raises(MachineError) as caught:
        requested_spec(path, None, {})
    assert caught.value.code == "read-failed"
