"""What is left out of the options of the objective is the default that is documented."""

from __future__ import annotations

from logra_lightning.objective import K3, NoCorrection, ObjectiveOptions, PPOClip, TokenTruncation


def test_left_out_options_are_the_documented_defaults() -> None:
    objective = ObjectiveOptions().objective()
    assert isinstance(objective.loss, PPOClip)
    assert isinstance(objective.correction, TokenTruncation)
    assert objective.reference_kl is None


def test_given_options_are_used() -> None:
    loss, correction, reference_kl = PPOClip(), NoCorrection(), K3(0.1)
    given = ObjectiveOptions(
        loss=loss, correction=correction, reference_kl=reference_kl, entropy_coefficient=0.25
    )
    objective = given.objective()
    assert objective.loss is loss
    assert objective.correction is correction
    assert objective.reference_kl is reference_kl
    assert objective.entropy_coefficient == 0.25
