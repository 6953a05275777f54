"""Seeds depend on every part, and on nothing else."""

from __future__ import annotations

from logra_lightning.seeding import derive_seed, run_seed, seed_for_all


def test_golden_seed() -> None:
    # Changing this changes every run: never update it lightly.
    assert derive_seed(0, 1, "rollout") == GOLDEN


# printf '0/1/rollout' | b2sum -l 64, as a little-endian number, halved.
GOLDEN = 5597452481317141759


def test_every_part_and_their_order_matter() -> None:
    seeds = {
        derive_seed(*parts)
        for parts in [(0, 1, 2, "a"), (1, 0, 2, "a"), (0, 1, 2, "b"), (0, 12, "a"), (0, 1, 2)]
    }
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_that_is_not_given_is_that_for_all() -> None:
    assert run_seed(None) == 0
    with seed_for_all(7):
        assert (run_seed(None), run_seed(3), run_seed(0)) == (7, 3, 0)
    assert run_seed(None) == 0
