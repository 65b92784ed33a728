"""The reference's Gumbel noise: Philox4x32-10 as published, with a Gumbel distribution, and independent for different keys."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from penstock.kernels import logarithm
from penstock.kernels.noise import gumbel, gumbel_all, philox

VOCABULARY = 1001  # no multiple of four
EULER = 0.5772156649


def words(text: str) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


def noise_row(seed: int = 1, choice: int = 0, position: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return gumbel_all(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]), vocabulary)[0]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123 (Salmon et al. 2011)
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_matches_published_known_answers(counter: str, key: str, expected: str) -> None:
    found = philox(words(key), words(counter))  # type: ignore[arg-type]
    assert [f"{int(word):08x}" for word in found] == expected.split()


def test_noise_of_some_ids_equals_that_of_the_whole_vocabulary() -> None:
    seeds, choices, positions = torch.tensor([3, -1, 3]), torch.tensor([0, 1, 2]), torch.tensor([5, 0, 70000])
    whole_vocabulary = gumbel_all(seeds, choices, positions, VOCABULARY)
    ids = torch.stack([torch.randperm(VOCABULARY)[:50] for _ in range(3)])
    assert gumbel(seeds, choices, positions, ids).equal(whole_vocabulary.gather(1, ids))
    assert gumbel_all(seeds, choices, positions, 7).equal(whole_vocabulary[:, :7])


def test_rows_are_bit_identical_whatever_the_other_rows_are() -> None:
    seeds = torch.arange(40)
    rows = gumbel_all(seeds, seeds % 3, seeds % 7, VOCABULARY)
    assert rows[17].equal(noise_row(17, 17 % 3, 17 % 7))


def test_noise_is_gumbel_distributed() -> None:
    sample = noise_row(vocabulary=1 << 19).double()
    assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > 0.01
    assert sample.mean().item() == pytest.approx(EULER, abs=0.01)
    assert sample.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_distribution_check_detects_noise_scaled_by_2_percent() -> None:
    assert stats.kstest(noise_row(vocabulary=1 << 19).numpy() * 1.02, "gumbel_r").pvalue < 0.01


@pytest.mark.parametrize("field", ["seed", "choice", "position"])
def test_rows_with_different_keys_are_independent(field: str) -> None:
    """No two of 200 rows correlate by more than is likely, and the noise of one id over all keys is Gumbel distributed as well."""
    rows = torch.stack([noise_row(**{field: value}) for value in range(200)])
    correlation = torch.corrcoef(rows).fill_diagonal_(0)
    assert correlation.abs().max() < 0.2  # standard deviation 1 / sqrt(1001), 19,900 pairs
    assert correlation.std().item() == pytest.approx(VOCABULARY**-0.5, rel=0.1)
    assert torch.corrcoef(rows.T).fill_diagonal_(0).abs().max() < 0.45  # of 200 values each, 500,500 pairs
    assert stats.kstest(rows[:, 0].numpy(), "gumbel_r").pvalue > 0.001


def test_every_bit_of_the_seed_and_choice_and_position_change_the_noise() -> None:
    found = [noise_row(seed=1 << bit if bit < 63 else -(1 << 63), vocabulary=8) for bit in range(64)]
    found += [noise_row(choice=1, vocabulary=8), noise_row(position=1, vocabulary=8), noise_row(position=1 << 31, vocabulary=8)]
    assert len({tuple(row.tolist()) for row in found}) == len(found)


def test_noise_is_finite_at_both_ends_of_the_word_range() -> None:
    """Word 0 and word 2^32 - 1."""
    ends = logarithm.gumbel(torch.tensor([0, 2**32 - 1]))
    assert ends.isfinite().all()
    assert ends[0] > 20  # the tail of large noise is resolved finely: u near 0 is a large noise
    assert -4 < ends[1] < -2.5
