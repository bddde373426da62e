"""The parts of the examples; whole runs of them are under the MPI tests."""

from __future__ import annotations

import argparse
import math
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from psdist.examples import chars

# --- characters: the text -------------------------------------------------------------------------


def decode(text: chars.Text) -> str:
    return "".join(chars.ALPHABET[index] for index in text)


@given(st.text(alphabet=chars.ALPHABET))
def test_text_in_the_alphabet_comes_back_as_it_was(text: str) -> None:
    assert decode(chars.encode(text)) == text


def test_what_is_not_in_the_alphabet_is_read_as_a_question_mark() -> None:
    assert decode(chars.encode("a\tb\x00ü\x7f€c\n")) == "a?b????c\n"


def write_library(root: Path) -> None:
    for name in ("a.py", "b/c.py", "b/test/d.py", "test/e.py", "site-packages/f.py", "g.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_source_files_are_the_modules_without_tests_in_the_same_order_everywhere(
    tmp_path: Path,
) -> None:
    orders = []
    for place in ("one", "another/place"):
        write_library(tmp_path / place)
        files = chars.source_files(tmp_path / place)
        orders.append([path.relative_to(tmp_path / place).as_posix() for path in files])
    assert sorted(orders[0]) == ["a.py", "b/c.py"]
    assert orders[0] == orders[1]


def test_reading_stops_at_the_file_that_completes_the_text(tmp_path: Path) -> None:
    for name in ("1", "2", "3"):
        (tmp_path / name).write_text(name * 4)
    files = iter(sorted(tmp_path.iterdir()))
    assert decode(chars.read_chars(files, 6)) == "111122"
    assert decode(chars.read_chars(files, 4)) == "3333"


def test_a_machine_without_sources_is_told_so() -> None:
    with pytest.raises(SystemExit, match="the sources of the standard library are not here"):
        chars.read_chars(iter([]), 1)


def test_this_machines_library_gives_both_texts_in_full() -> None:
    train, valid = chars.load_text()
    assert (len(train), len(valid)) == (chars.TRAIN_CHARS, chars.VALID_CHARS)
    assert max(train.max(), valid.max()) < len(chars.ALPHABET)


def test_windows_hold_each_character_and_the_one_after_it() -> None:
    x, y = chars.windows(np.arange(10, dtype=np.uint8), 3).tensors
    assert x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert y.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert x.dtype == y.dtype == torch.int64


# --- characters: the trigram model ----------------------------------------------------------------


def trigram_bits_one_by_one(train: str, valid: str, k: float) -> float:
    """The formula of the docstring by counting in strings."""

    def p(char: str, context: str) -> float:
        if not context:
            return (train.count(char) + 1) / (len(train) + len(chars.ALPHABET))
        starts = [i for i in range(len(train) - len(context)) if train[i:].startswith(context)]
        hits = sum(train[i + len(context)] == char for i in starts)
        return (hits + k * p(char, context[1:])) / (len(starts) + k)

    bits = [-math.log2(p(valid[i], valid[i - 2 : i])) for i in range(2, len(valid))]
    return sum(bits) / len(bits)


def test_the_trigram_model_is_its_formula() -> None:
    train, valid = "abracadabra aa", "abba cabz"
    expected = trigram_bits_one_by_one(train, valid, 3.0)
    found = chars.trigram_bits(chars.encode(train), chars.encode(valid), strength=3.0)
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_trigram_model_knows_what_repeats_and_pays_for_what_is_new() -> None:
    train = chars.encode("abc" * 2000)
    assert chars.trigram_bits(train, chars.encode("abcabcabc")) < 0.01
    assert chars.trigram_bits(train, chars.encode("xyzzyx")) > math.log2(len(chars.ALPHABET))


# --- characters: the transformer ------------------------------------------------------------------


def small_model() -> chars.CharTransformer:
    torch.manual_seed(0)
    model = chars.CharTransformer(length=16, width=8, num_blocks=2, num_heads=2)
    for parameter in model.parameters():  # the blocks' last layers start at zero
        nn.init.normal_(parameter, std=0.5)
    return model


def test_the_transformer_scores_each_symbol_after_each_character() -> None:
    scores = small_model()(torch.zeros(3, 16, dtype=torch.int64))
    assert scores.shape == (3, 16, len(chars.ALPHABET))


def test_the_transformer_takes_texts_shorter_than_its_window() -> None:
    model = small_model()
    text = torch.arange(16)[None]
    torch.testing.assert_close(model(text[:, :5]), model(text)[:, :5])


@pytest.mark.parametrize("changed", [0, 7, 15])
def test_the_transformer_does_not_look_ahead_but_looks_back(changed: int) -> None:
    model = small_model()
    text = torch.arange(16)[None]
    other = text.clone()
    other[0, changed] = 50
    differs = (model(text) - model(other)).abs().amax(dim=(0, 2)) > 1e-5
    assert differs.tolist() == [False] * changed + [True] * (16 - changed)


def test_the_transformer_has_as_many_parameters_as_it_says() -> None:
    num_parameters = sum(p.numel() for p in chars.CharTransformer().parameters())
    assert f"{num_parameters:,} parameters" in str(chars.CharTransformer.__doc__)


def test_an_ignorant_model_needs_the_bits_of_the_alphabet() -> None:
    num = len(chars.ALPHABET)
    bits = chars.bits_per_char(torch.zeros(2, 4, num), torch.ones(2, 4, dtype=torch.int64))
    assert bits.item() == pytest.approx(math.log2(num))


def test_validation_is_the_mean_over_all_characters_whatever_the_batches() -> None:
    model = small_model()
    text = np.random.default_rng(0).integers(0, 96, size=70 * 16 + 1).astype(np.uint8)
    valid_set = chars.windows(text, 16)
    found = chars.validation_bits(model, valid_set, torch.device("cpu"))
    with torch.no_grad():
        expected = chars.bits_per_char(model(valid_set.tensors[0]), valid_set.tensors[1])
    assert found == pytest.approx(expected.item(), rel=1e-5)
    assert model.training


def test_every_parameter_is_in_one_optimizer_group() -> None:
    model = small_model()
    groups = chars.optimizer_groups(model, weight_decay=0.1)
    ids = [id(p) for group in groups for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(ids) == sorted(map(id, model.parameters()))


def test_the_learning_rate_goes_up_and_then_down_to_a_tenth() -> None:
    factors = [chars.learning_rate_factor(step, 100) for step in range(101)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.1)
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert all(0 < chars.learning_rate_factor(step, 1) <= 1 for step in range(3))


# --- digits ---------------------------------------------------------------------------------------


@pytest.fixture
def digits() -> ModuleType:
    """Imported by those who use it: scikit-learn would cost every process that collects 1 s."""
    return import_module("psdist.examples.digits")


def test_the_digits_are_split_into_training_and_test_images(digits: ModuleType) -> None:
    train_set, test_set = digits.load_data()
    assert (len(train_set), len(test_set)) == (1437, 360)
    x, y = test_set.tensors
    assert x.shape == (360, 64)
    assert (x.min().item(), x.max().item()) == (0.0, 1.0)
    assert set(y.tolist()) == set(range(10))


def test_the_digits_model_scores_ten_digits(digits: ModuleType) -> None:
    model = digits.build_model()
    assert model(torch.zeros(5, 64)).shape == (5, 10)
    num_parameters = sum(p.numel() for p in model.parameters())
    assert f"{num_parameters} parameters" in str(digits.build_model.__doc__)


def test_the_worker_to_slow_is_read_from_the_command_line(digits: ModuleType) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--slow-worker", type=digits.slow_worker)
    assert parser.parse_args(["--slow-worker", "1:2.5"]).slow_worker == (1, 2.5)
    for wrong in ("1", "x:2", "1:fast"):
        with pytest.raises(argparse.ArgumentError, match="invalid slow_worker value"):
            parser.parse_args(["--slow-worker", wrong])


# --- the click log --------------------------------------------------------------------------------


@pytest.fixture
def dlrm() -> ModuleType:
    return import_module("examples.dlrm")


def test_an_impression_is_the_same_in_any_batch_and_from_any_beginning(dlrm: ModuleType) -> None:
    log = dlrm.Clicks(1000, dlrm.CARDINALITIES, seed=3)
    dense, ids, clicks = log.__getitems__([7, 500, 7])
    for row, number in enumerate((7, 500, 7)):
        assert all(map(torch.equal, log[number], (dense[row], ids[row], clicks[row])))
    later = dlrm.Clicks(1000, dlrm.CARDINALITIES, first=400, seed=3)
    assert all(map(torch.equal, later[100], (dense[1], ids[1], clicks[1])))
    other = dlrm.Clicks(1000, dlrm.CARDINALITIES, seed=4)
    assert not torch.equal(other[7][1], ids[0])


def test_ids_of_the_log_follow_zipfs_law(dlrm: ModuleType) -> None:
    num_rows, power = 1000, 1.05
    ids = dlrm.Clicks(100_000, [num_rows], zipf=power).__getitems__(range(100_000))[1]
    found = torch.bincount(ids[:, 0], minlength=num_rows).sort(descending=True).values / 100_000
    edges = torch.arange(1, num_rows + 2, dtype=torch.float64) ** (1 - power)
    expected = (edges.diff() / (edges[-1] - 1))[:20]
    assert torch.allclose(found[:20].double(), expected, rtol=0.1)
    assert len(found) == num_rows


def test_clicks_follow_the_planted_model(dlrm: ModuleType) -> None:
    log = dlrm.Clicks(20_000, dlrm.CARDINALITIES)
    dense, ids, clicks = log.__getitems__(range(20_000))
    logits = torch.from_numpy(log.logits(dense.double().numpy(), ids.T.numpy()))
    assert dlrm.area_under_curve(logits, clicks) == pytest.approx(0.80, abs=0.02)
    assert clicks.mean().item() == pytest.approx(logits.sigmoid().mean().item(), abs=0.01)


def test_the_area_under_the_curve_is_the_chance_of_the_right_order(dlrm: ModuleType) -> None:
    clicks = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert dlrm.area_under_curve(torch.tensor([0.1, 0.2, 0.3, 0.4]), clicks) == 0.75
    assert dlrm.area_under_curve(torch.tensor([0.1, 0.9, 0.3, 0.4]), clicks) == 1.0
