"""Lightning strategies that train with sketches, on one device or several.

Importing this registers them with Lightning under their names `sketch`, `sketch_ddp` and
`sketch_fsdp`, so that `trainer.strategy: sketch_ddp` works.
"""

from lightning.pytorch.strategies import StrategyRegistry

from logra_lightning.strategy.ddp import SketchDDPStrategy
from logra_lightning.strategy.fsdp import SketchFSDPStrategy
from logra_lightning.strategy.mixin import SketchMixin, check_trainer_options
from logra_lightning.strategy.single import SketchStrategy
from logra_lightning.strategy.start import load_policy_for
from logra_lightning.strategy.trained import freeze_others_, tell_what_trains

for _strategy, _description in (
    (SketchStrategy, "gradient sketches, one device"),
    (SketchDDPStrategy, "gradient sketches, the whole model on each of several devices"),
    (SketchFSDPStrategy, "gradient sketches, a part of the weights on each of several devices"),
):
    # By its class too, as `--trainer.strategy=SketchStrategy` names it; Lightning looks for the
    # name in lower case.
    for _name in (_strategy.strategy_name, _strategy.__name__.lower()):
        if _name not in StrategyRegistry:
            StrategyRegistry.register(_name, _strategy, description=_description)

__all__ = [
    "SketchDDPStrategy",
    "SketchFSDPStrategy",
    "SketchMixin",
    "SketchStrategy",
    "check_trainer_options",
    "freeze_others_",
    "load_policy_for",
    "tell_what_trains",
]
