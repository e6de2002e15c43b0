"Augmentation: what it changes, how much, and what it never does."

import inspect
import math
from dataclasses import asdict, replace
from io import BytesIO
from typing import Any

import pytest
import torch
from each import each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leakmel.core.errors import UsageError
from leakmel.detector.data.segments import open_loader
from leakmel.detector.model.net import (
    add_power,
    augment,
    mask_plan,
    noise_floors,
    random_masks,
    smooth_curves,
)
from leakmel.detector.model.settings import AugmentSettings, TrainSettings, settings_from

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)
pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
OFF = AugmentSettings(level_db=0, colour_db=0, noise_share=0, n_band_masks=0, n_time_masks=0)


def only(**changes: Any) -> AugmentSettings:
    "These changes and no others."
    return replace(OFF, **changes)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int = 500, m: int = 16, w: int = 3, seed: int = 9) -> Tensor:
    return torch.randn(n, m, w, generator=generator(seed)) * 8 - 50


# What is asked for


@quick
@given(st.integers(1, 40), st.integers(0, 12), st.integers(0, 60), st.integers(0, 1 << 40))
def test_masks_never_hide_everything(size, n_masks, width, seed):
    hidden = random_masks(64, size, n_masks, width, generator(seed))
    assert hidden.shape == (64, size)
    assert hidden.dtype is torch.bool
    assert not hidden.all(1).any()
    n, most = mask_plan(size, n_masks, width)
    assert n <= n_masks
    assert most <= width
    assert n * most < size
    assert int(hidden.sum(1).max()) <= n * most


@quick
@given(
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(0, 1 << 40),
)
def test_no_item_is_masked_completely(m, w, n_band, band_width, n_time, time_width, seed):
    x = pictures(32, m, w, seed)
    s = only(n_band_masks=n_band, band_mask_width=band_width, n_time_masks=n_time, time_mask_width=time_width)
    out = augment(x, torch.full((m,), 1e4), s, generator(seed))
    kept = out == x
    assert torch.equal(kept, out != 1e4)
    assert kept.flatten(1).any(1).all()
    assert kept.any(1).any(1).all()
    assert kept.any(2).any(1).all()
    if w == 1:
        assert kept.any(2).sum() == kept.sum()  # one column: no mask over time
    if m == 1:
        assert kept.any(1).sum() == kept.sum()  # one band: no mask over bands


def test_single_columns_have_no_time_mask():
    x = pictures(400, 16, 1)
    assert torch.equal(augment(x, torch.zeros(16), only(n_time_masks=4, time_mask_width=4), generator()), x)
    assert torch.equal(
        augment(pictures(9, 1, 5), torch.zeros(1), only(n_band_masks=4, band_mask_width=4), generator()),
        pictures(9, 1, 5),
    )


def test_widths_of_masks_are_equally_frequent_and_everywhere():
    hidden = random_masks(40_000, 12, 1, 3, generator())
    widths = hidden.sum(1)
    assert torch.allclose(torch.bincount(widths, minlength=4) / 40_000, torch.full((4,), 0.25), atol=0.01)
    ones = hidden[widths == 1].float().mean(0)
    assert torch.allclose(ones, torch.full((12,), 1 / 12), atol=0.01)
    runs = (hidden[:, 1:] & ~hidden[:, :-1]).sum(1) + hidden[:, 0]
    assert int(runs.max()) == 1  # neighbours


def test_masked_values_are_band_means():
    x, fill = pictures(), torch.arange(16.0)
    out = augment(
        x,
        fill[:, None],
        only(n_band_masks=2, band_mask_width=4, n_time_masks=1, time_mask_width=1),
        generator(3),
    )
    changed = out != x
    assert changed.any()
    assert torch.equal(out[changed], fill[:, None].expand(16, 3).expand_as(x)[changed])
    assert 0.2 < float(changed.float().mean()) < 0.5


# Levels and colours


def test_a_level_is_the_same_for_all_of_an_item():
    x = pictures(4000).double()
    shift = augment(x, torch.zeros(16), only(level_db=6.0), generator()) - x
    assert torch.allclose(shift, shift[:, :1, :1].expand_as(shift), atol=1e-9)
    assert abs(float(shift[:, 0, 0].std()) - 6) < 0.3
    assert abs(float(shift.mean())) < 0.4


@each("m", [2, 3, 5, 16, 64])
def test_colours_are_smooth_and_keep_the_level(m):
    curves = smooth_curves(5000, m, 3.0, generator())
    assert abs(float(curves.pow(2).mean().sqrt()) - 3.0) < 0.15
    assert float(curves.mean(1).abs().max()) < 1e-4
    if m == 64:
        assert float((curves[:, 2:] - 2 * curves[:, 1:-1] + curves[:, :-2]).abs().max()) < 0.5  # no corners
    x = pictures(100, m)
    colour = augment(x, torch.zeros(m), only(colour_db=3.0), generator()) - x
    assert torch.allclose(colour, colour[:, :, :1].expand_as(colour), atol=1e-4)


# Noise


def test_powers_of_noise_and_signal_add():
    a, b = torch.tensor([0.0, -30.0, -200.0, 40.0]), torch.tensor([0.0, -20.0, 10.0, -90.0])
    assert torch.allclose(
        add_power(a, b),
        10 * torch.log10(10 ** (a.double() / 10) + 10 ** (b.double() / 10)).float(),
        atol=1e-4,
    )


def test_noise_only_adds_power():
    x = pictures(3000)
    out = augment(x, torch.zeros(16), only(noise_share=0.5, noise_snr_db=-10.0), generator(1))
    noisy = (out != x).flatten(1).any(1)
    assert bool((out >= x).all())
    assert abs(float(noisy.float().mean()) - 0.5) < 0.03
    assert torch.isfinite(out).all()
    assert torch.equal(out[~noisy], x[~noisy])


def test_noise_has_the_level_that_was_asked_for():
    x, s = (
        pictures(6000, 32, 4),
        AugmentSettings(noise_share=1.0, noise_snr_db=3.0, noise_snr_range_db=12.0, colour_db=0.0),
    )
    floors = noise_floors(x, s, generator())

    def mean_db(v: Tensor) -> Tensor:
        return 10 * torch.log10((10 ** (v.double() / 10)).flatten(1).mean(1))

    snr = mean_db(x) - mean_db(floors)
    assert abs(float(snr.mean()) - 9) < 0.3
    assert float(snr.min()) > 1.5
    assert float(snr.max()) < 17
    inside = floors.double() - mean_db(floors)[:, None, None]  # stationary: no band, no column stands out
    assert float(inside.mean((0, 2)).std()) < 0.1
    assert float(inside.mean((0, 1)).std()) < 0.1


def test_silence_stays_finite():
    x = torch.full((50, 8, 2), -200.0)
    assert torch.isfinite(augment(x, torch.zeros(8), AugmentSettings(noise_share=1.0), generator())).all()


# Randomness


def test_augmentation_depends_only_on_the_generator():
    x, s = pictures(), AugmentSettings(noise_share=0.5)
    torch.manual_seed(1)
    first = augment(x, torch.zeros(16), s, generator(5))
    before = torch.get_rng_state()
    again, other = augment(x, torch.zeros(16), s, generator(5)), augment(x, torch.zeros(16), s, generator(6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_items_are_augmented_differently_and_the_input_is_unchanged():
    x = pictures(1).expand(300, 16, 3).contiguous()
    kept = x.clone()
    out = augment(x, torch.zeros(16), AugmentSettings(), generator())
    assert torch.equal(x, kept)
    assert len(torch.unique(out.flatten(1), dim=0)) == 300
    assert augment(x, torch.zeros(16), OFF, generator()).equal(x)


# Settings


@each(
    "wrong",
    [
        {"epochs": 0},
        {"epochs": 2.5},
        {"epochs": True},
        {"batch_size": -1},
        {"detector": "forest"},
        {"learning_rate": 0},
        {"learning_rate": math.nan},
        {"learning_rate": "fast"},
        {"warmup_share": 1.1},
        {"min_lr_share": -0.1},
        {"loss": "hinge"},
        {"loss": None},
        {"class_weights": "even"},
        {"class_weights": True},
        {"amp": "fp8"},
        {"channels_last": "yes"},
        {"channels_last": 1},
        {"accumulation": 0},
        {"accumulate_batches": 0},
        {"micro_batch": -1},
        {"clip_norm": math.inf},
        {"n_band_masks": -1},
        {"noise_share": 2},
        {"level_db": -1},
        {"profile_every": 0},
        {"seed": -1},
        {"channels": "48"},
        {"channels": (8, 0)},
        {"channels": (8, True)},
        {"channels": 8},
        {"dropout": 1.0},
        {"buffer_blocks": 0},
        {"loader": "workers"},
        {"loss": "focal", "label_smoothing": 0.1},
        {"use_compile": "yes"},
    ],
)
def test_invalid_settings_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong)).split("_")[0]):
        TrainSettings(**wrong)


def test_settings_survive_a_round_trip():
    mine, file = (
        TrainSettings(channels=(8, 16), class_weights=None, channels_last=False, preload_to_ram=True),
        BytesIO(),
    )
    torch.save(asdict(mine), file)
    file.seek(0)
    assert settings_from(torch.load(file, weights_only=True)) == mine
    assert hash(mine) == hash(TrainSettings(**asdict(mine)))
    with pytest.raises(UsageError, match="the setting is unknown; found batchsize"):
        settings_from({"batchsize": 3})


def test_settings_of_the_loader_are_those_of_open_loader():
    known = inspect.signature(open_loader).parameters
    for name in ("device_fraction", "buffer_blocks"):
        assert known[name].default == getattr(TrainSettings(), name)


class EmptyOperations(TorchDispatchMode):
    "Counts operations whose result is an empty tensor."

    def __init__(self) -> None:
        super().__init__()
        self.n = self.n_empty = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **kwargs or {})
        self.n += 1
        self.n_empty += isinstance(result, torch.Tensor) and result.numel() == 0
        return result


@each("n_band_masks", [0, 2])
@each("n_time_masks", [0, 2])
def test_masks_that_are_not_wanted_cost_no_operation(n_band_masks, n_time_masks):
    x, fill = pictures(5, 8, 6), torch.zeros(8)
    both = only(n_band_masks=n_band_masks, band_mask_width=3, n_time_masks=n_time_masks, time_mask_width=2)
    with EmptyOperations() as found:
        y = augment(x, fill, both, generator())
    assert found.n_empty == 0
    assert found.n > 0 or not n_band_masks + n_time_masks
    again = generator()
    bands = random_masks(5, 8, n_band_masks, 3, again)[:, :, None]
    columns = random_masks(5, 6, n_time_masks, 2, again)[:, None, :]
    assert torch.equal(y, torch.where(bands | columns, 0.0, x))
