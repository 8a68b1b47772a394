"""Texts and the batches drawn from them."""

from __future__ import annotations

import pytest
import torch

from zoff_async.train.text import Text, load_text


def counting(n: int) -> Text:
    return Text("counting", torch.arange(n, dtype=torch.uint8))


def test_targets_are_the_bytes_that_follow():
    tokens, targets = counting(100).batch(batch=4, context=10, seed=0, step=0)

    assert tokens.shape == targets.shape == (4, 10)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)


def test_a_batch_depends_on_seed_step_and_part_only():
    text = counting(200)

    def draw(seed: int, step: int, part: int) -> list[int]:
        torch.rand(3)  # whatever else has been drawn meanwhile
        return text.batch(batch=8, context=4, seed=seed, step=step, part=part)[0][:, 0].tolist()

    assert draw(0, 5, 1) == draw(0, 5, 1)
    assert len({tuple(draw(*place)) for place in [(0, 5, 1), (1, 5, 1), (0, 6, 1), (0, 5, 0)]}) == 4


def test_the_whole_text_can_be_drawn():
    tokens, targets = counting(12).batch(batch=400, context=4, seed=0, step=0)

    assert tokens.min() == 0
    assert targets.max() == 11


def test_a_text_of_one_sequence_is_enough():
    text = counting(5)
    text.require(4)

    tokens, targets = text.batch(batch=2, context=4, seed=0, step=0)

    assert tokens.tolist() == [[0, 1, 2, 3]] * 2
    assert targets.tolist() == [[1, 2, 3, 4]] * 2


def test_a_text_shorter_than_the_context_is_refused():
    with pytest.raises(ValueError) as caught:
        counting(4).require(4)

    assert str(caught.value) == (
        "text 'counting' has 4 bytes, --context 4 needs 5: give a longer --text or a smaller --context"
    )


def test_the_default_text_comes_with_python():
    text = load_text(None)

    assert text.name == "pydoc_data.topics"
    assert len(text.data) > 100_000
    assert text.sha256 == load_text(None).sha256


def test_a_file_is_read_byte_for_byte(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)))

    assert load_text(str(path)).data.tolist() == list(range(256))


def test_a_missing_file_is_refused(tmp_path):
    path = str(tmp_path / "none.txt")
    with pytest.raises(ValueError) as caught:
        load_text(path)

    assert str(caught.value) == (
        f"cannot read --text {path!r}: No such file or directory; give a file that can be read"
    )


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(ValueError) as caught:
        load_text(str(tmp_path))

    assert str(caught.value) == (f"cannot read --text {str(tmp_path)!r}: Is a directory; give a file that can be read")


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(ValueError) as caught:
        load_text(str(path))

    assert str(caught.value) == f"--text {str(path)!r} is empty: give a file with something to learn"
