"""What a run is asked to do."""

from __future__ import annotations

import pytest
import torch

from zoff_async.scheduler import POLICIES
from zoff_async.train.model import SIZES
from zoff_async.train.settings import TrainSettings, settings_from


def test_what_is_left_out_comes_from_the_size():
    settings = settings_from({"size": "small", "steps": 50, "batch": 3})

    assert (settings.batch, settings.context, settings.lr, settings.warmup) == (3, 256, 1e-3, 5)
    assert settings.tokens_per_step == 3 * 256


def test_settings_survive_being_saved():
    settings = settings_from({"steps": 30, "max_norm": 1.0, "dtype": "bf16"})

    assert TrainSettings(**settings.asdict()) == settings


def test_the_optimizer_gets_what_was_chosen_and_keeps_its_own_defaults():
    config = settings_from({"accumulate": 3, "workers": 1, "chunk_numel": 7}).offload_config()

    assert (config.backwards_per_step, config.workers, config.chunk_numel) == (3, 1, 7)
    assert config.bucket_bytes is None


@pytest.mark.parametrize("device", ["cpu", "host", "emulated:v100-32g-dgx2"])
def test_the_model_of_a_device_without_memory_of_its_own_lives_on_the_cpu(device):
    assert settings_from({"device": device}).torch_device() == torch.device("cpu")


REFUSED = [
    ({"size": "huge"}, f"--size must be one of {', '.join(SIZES)}, got 'huge'"),
    ({"policy": "speculative"}, f"policy 'speculative' is not there yet; use one of {', '.join(POLICIES)}"),
    ({"steps": 0}, "--steps must be at least 1, got 0"),
    ({"batch": -1}, "--batch must be at least 1, got -1"),
    ({"context": 0}, "--context must be at least 1, got 0"),
    ({"accumulate": 0}, "--accumulate must be at least 1, got 0"),
    ({"seed": -1}, "--seed must be at least 0, got -1"),
    ({"warmup": -1}, "--warmup must be at least 0, got -1"),
    ({"lr": -0.1}, "--lr must be a finite number of at least 0, got -0.1"),
    ({"lr": float("nan")}, "--lr must be a finite number of at least 0, got nan"),
    ({"max_norm": 0.0}, "--max-norm must be a finite number above 0, got 0.0"),
    ({"weight_decay": float("inf")}, "--weight-decay must be a finite number of at least 0, got inf"),
    ({"dtype": "fp8"}, "--dtype must be one of fp32, bf16, got 'fp8'"),
    (
        {"dtype": "fp16"},
        "--dtype fp16 is not there: it needs a loss scale, which train does not apply; "
        "use --dtype bf16, which needs none and is as small",
    ),
    ({"workers": 0}, "workers must be at least 1, got 0"),
    ({"kernel": "fast"}, "kernel must be one of auto, numexpr, numba, torch, got 'fast'"),
    ({"colour": 1, "shape": 2}, "unknown settings colour, shape: they are "),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda value: str(value)[:24])
def test_a_bad_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError) as caught:
        settings_from(options)

    if "unknown" in message:
        assert str(caught.value).startswith(message)
    else:
        assert str(caught.value) == message


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError) as caught:
        settings_from({"device": "abacus"})

    assert "abacus" in str(caught.value)
    assert "emulated:PRESET" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_an_absent_device_is_refused():
    with pytest.raises(ValueError) as caught:
        settings_from({"device": "cuda"})

    assert str(caught.value) == "--device cuda: torch sees no CUDA device here; use --device auto or cpu"


def test_a_number_of_the_wrong_type_is_refused():
    with pytest.raises(TypeError) as caught:
        settings_from({"lr": "fast"})

    assert str(caught.value) == "--lr must be a number of at least 0, got 'fast'"
