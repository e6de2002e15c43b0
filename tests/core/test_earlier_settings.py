"Settings of the earlier system: each is recognised by build and train, and each hint names settings that exist."

import ast
import tomllib
from pathlib import Path

from each import each

import leakmel as lm
from leakmel.cli import main
from leakmel.core.operation import parameter_kinds
from leakmel.core.parameters import EARLIER_SETTINGS, answer_unknown
from leakmel.operations.data import Build
from leakmel.operations.detector import Train

BUILD, TRAIN = list(parameter_kinds(Build)), list(parameter_kinds(Train))
NAMES = [name for setting in EARLIER_SETTINGS for name in setting.names]


def test_replacements_exist_and_no_hint_contradicts_a_setting():
    assert len({n.casefold() for n in NAMES}) == len(NAMES)
    for setting in EARLIER_SETTINGS:
        assert set(setting.ours) <= set(BUILD) | set(TRAIN), setting
        for name in setting.names:
            if name.casefold() in {*BUILD, *TRAIN}:
                assert setting.ours == (name.casefold(),), "a setting of this name exists"


@each("name", NAMES)
def test_every_name_is_recognised(name):
    for known in (BUILD, TRAIN):
        text = answer_unknown(name, known)
        assert "is unknown" not in text
        assert "did you mean" not in text


@each(
    ("command", "name", "here"),
    [
        ("build", "ASYNC_COPIES", "async_copies"),
        ("build", "WARMUP_QUEUE_SIZE", "warmup_slots"),
        ("build", "PREFETCH_DEPTH", "read_ahead"),
        ("build", "disk_max_inflight", "read_ahead"),
        ("build", "CUDA_STREAMS", "gpu_streams"),
        ("build", "gradient_accumulation_steps", "accumulate_batches, a setting of leakmel train"),
        ("train", "gradient_accumulation_steps", "accumulate_batches (batches"),
        ("train", "CUDA_STREAMS", "gpu_streams, a setting of leakmel build"),
        ("train", "ASYNC_COPIES", "async_copies, a setting of leakmel build"),
        ("train", "use_mmap_cache", "preload_to_ram"),
    ],
)
def test_hints_of_the_command_line(command, name, here, capsys, tmp_path):
    assert main([command, str(tmp_path), "--out", str(tmp_path / "out"), f"--{name}", "8"]) == 2
    assert here in capsys.readouterr().err.replace("is written ", "")


def test_each_unknown_option_is_explained(capsys, tmp_path):
    words = ["--num-workers", "4", "--prefetch-factor", "8"]
    assert main(["train", str(tmp_path), "--out", str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert "num_workers has no counterpart in leakmel" in said
    assert "prefetch_factor has no counterpart in leakmel" in said


def test_the_configuration_has_the_settings_of_speed():
    speed = {n for s in EARLIER_SETTINGS if s.area == "speed" for n in s.ours}
    assert speed <= set(lm.PipelineConfig.__dataclass_fields__)


def test_capabilities_of_the_earlier_system_name_tests_that_try_them():
    root = Path(__file__).parents[2]
    table = (root / "nbs" / "explanations" / "capabilities.toml").read_text(encoding="utf-8")
    for row in tomllib.loads(table)["capability"]:
        assert row["was"]
        assert row["here"]
        for name in row["tests"]:
            file, _, function = name.partition("::")
            (path,) = (root / "tests").rglob(file)
            found = {
                n.name for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)
            }
            assert function in found, name
