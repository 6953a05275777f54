"""Statistics of a batch do not depend on its cut; those of several steps are averaged."""

from __future__ import annotations

import pytest

from logra_lightning.objective import BatchStats, batch_stats
from tests.objective.batches import microbatch, tensor

VALUES = [3.0, 1.0, -4.0, 1.0, 5.0, 9.0]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_cut_changes_nothing(size: int) -> None:
    stats = BatchStats()
    stats.begin_step()
    for i in range(0, 6, size):
        part = VALUES[i : i + size]
        batch = microbatch(part, num_completion_tokens=6)
        stats.add_mean("mean", tensor(part), batch)
        stats.add_extreme("x_max", tensor(part))
        stats.add_extreme("x_min", tensor(part))
        stats.add_weights(tensor(part).abs(), batch)
    values = stats.values()
    assert values["mean"] == pytest.approx(15 / 6)
    assert values["x_max"] == 9.0
    assert values["x_min"] == -4.0
    assert values["mismatch/effective_sample_frac"] == pytest.approx(23**2 / (6 * 133))


def test_steps_of_one_batch_are_averaged_and_extremes_kept() -> None:
    stats = BatchStats()
    for value in (2.0, 6.0):
        stats.begin_step()
        stats.add_mean("mean", tensor([value]), microbatch([1.0]))
        stats.add_extreme("x_max", tensor([value]))
    assert stats.values()["mean"] == 4.0
    assert stats.values()["x_max"] == 6.0


def test_steps_that_one_process_alone_has_rollouts_in_count_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes, the first step in one of them and the second in the other: a mean of .01."""
    of_processes = []
    for own in (0, 1):
        stats = BatchStats()
        for step in (0, 1):
            stats.begin_step()
            if step == own:
                stats.add_mean("mismatch/kl", tensor([0.01, 0.01]), microbatch([1.0, 1.0]))
        monkeypatch.setattr(
            batch_stats, "of_all_processes", lambda value: of_processes.append(value) or [value]
        )
        stats.values()
    monkeypatch.setattr(batch_stats, "of_all_processes", lambda _: of_processes)
    assert BatchStats().values() == {"mismatch/kl": pytest.approx(0.01)}


def test_nothing_was_added_and_nothing_is_told() -> None:
    assert BatchStats().values() == {}
