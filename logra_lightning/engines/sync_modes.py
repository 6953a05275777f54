"""The three ways by which the policy's weights reach an engine: factors, shared memory, or densely.

`WeightSync` makes the first sync by `begin`, passes on the factors of each optimizer step by `take`
and asks for a `sync` when a training batch ends. For a way of your own, derive a class from
`SyncMode` and name it in `weight_sync.mode` by its `class_path`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter

from logra_lightning.distributed.sharding import whole
from logra_lightning.engines.engine import SyncedEngine
from logra_lightning.engines.weights import PolicyWeight, named_parameters
from logra_lightning.optim import RowAdam
from logra_lightning.sketch import Factors


@dataclass(frozen=True)
class PolicyParameter:
    """A parameter of the policy, of which this process may hold only some rows.

    Args:
        name: name of the parameter in the policy.
        parameter: the parameter itself.
        residual: [held, k] int16, the low half of the fp32 master of a bf16 weight, for the rows
            that this process holds; None if there is none, or if it is not to be sent.
        projection: name of the projection by which factors update the parameter; None if they
            do not.
        changes: whether training changes the parameter, by sketches or densely.
    """

    name: str
    parameter: Parameter
    residual: Tensor | None
    projection: str | None
    changes: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight and its residual."""
        size = self.parameter.element_size() + (0 if self.residual is None else 2)
        return self.parameter.numel() * size

    def weight(self) -> PolicyWeight:
        """All rows, as an engine takes them; every process must call it."""
        low = None if self.residual is None else whole(self.parameter, self.residual)
        return PolicyWeight(self.name, whole(self.parameter), low, self.projection)


@dataclass(frozen=True)
class TrainedPolicy:
    """The policy, with the optimizer that knows which of its weights are sketched.

    Args:
        model: the `transformers` model that is trained.
        optimizer: the `RowAdam` that trains it; None in a run without sketches.
    """

    model: nn.Module
    optimizer: RowAdam | None

    def parameters(self, *, as_factors: bool) -> list[PolicyParameter]:
        """All parameters of the policy.

        Args:
            as_factors: whether sketched weights will be updated by factors. Then they come with
                their projection and the residual of their master; without them otherwise.
        """
        sketched = {} if self.optimizer is None else self.optimizer.sketched_names()
        found = []
        for name, parameter in named_parameters(self.model):
            projection, residual = sketched.get(parameter), None
            changes = projection is not None or parameter.requires_grad
            if not as_factors:
                projection = None
            elif projection is not None:
                assert self.optimizer is not None
                residual = self.optimizer.residual(parameter)
            found.append(PolicyParameter(name, parameter, residual, projection, changes))
        return found


@dataclass(frozen=True)
class Sent:
    """What one sync sent.

    Args:
        nbytes: bytes of weights and factors.
        number: what is logged as `sync/mode`; the mode's own number, unless another way was taken.
    """

    nbytes: int
    number: float


class SyncMode(ABC):
    """A way to keep a `SyncedEngine` equal to the policy, bit for bit.

    Attributes:
        name: what messages call it.
        number: what is logged as `sync/mode`: 0 shared, 1 factors, 2 dense, 3 any other.
        as_factors: whether it sends factors. `WeightSync` then takes `DenseSync` in its place where
            there is no `RowAdam`, or where the engine gives its weights back when it sleeps.
    """

    name = "custom"
    number = 3.0
    as_factors = False

    @abstractmethod
    def begin(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> int:
        """Make the engine's weights those of the policy, when training starts or is resumed.

        Whatever an earlier run left in this object is forgotten.

        Args:
            engine: the engine, started with any weights.
            policy: the policy as it is now.
            version: number of optimizer steps that made its weights.

        Returns:
            Bytes that were sent.
        """

    def take(self, factors: Factors) -> None:  # noqa: B027  (a mode need not care)
        """Called after each step of a `RowAdam` with what the step merged into the policy.

        Keep the factors only as long as they are needed: nobody else does. Does nothing here.
        """

    @abstractmethod
    def sync(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> Sent:
        """Make the engine's weights those of the policy, when a training batch ends.

        Args:
            engine: the engine.
            policy: the policy as it is now.
            version: number of optimizer steps that made its weights; perhaps several more than the
                engine's.

        Returns:
            What was sent.
        """

    def parameters(self, policy: TrainedPolicy) -> list[PolicyParameter]:
        """The policy's parameters as the engine should hold them, to send or to compare."""
        return policy.parameters(as_factors=self.as_factors)

    def plan(self, parameters: Sequence[PolicyParameter]) -> str:
        """How weights that train will travel, in a few words for the log."""
        return f"{sum(p.changes for p in parameters)} weights train"


class FactorSync(SyncMode):
    """Sends the factors of each step, which the engine merges into masters of its own.

    A step costs the directions D (bf16), a seed and a scalar: row 9 of docs/method.md. Weights that
    AdamW trains are sent whole along with them. Where the steps do not follow on from the engine's
    version, all weights are sent once, with a warning.
    """

    name = "factors"
    number = 1.0
    as_factors = True

    def __init__(self) -> None:
        self._queue: list[Factors] = []

    def begin(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> int:
        """Send all weights, with what the engine needs to build its masters."""
        self._queue = []
        return _load(engine, self.parameters(policy), version)

    def take(self, factors: Factors) -> None:
        """Keep the factors until the batch ends."""
        self._queue.append(factors)

    def sync(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> Sent:
        """Send the factors of the batch's steps, in order."""
        updates, self._queue = self._queue, []
        held, parameters = engine.policy_version, self.parameters(policy)
        made_from = [*(factors.version for factors in updates), version]
        if made_from != [held, *(factors.version + 1 for factors in updates)]:
            rank_zero_warn(
                f"the engine holds policy version {held} and the policy is {version}, but there "
                f"are factors of {made_from[:-1] or 'none'}: sending all weights"
            )
            return Sent(_load(engine, parameters, version), DenseSync.number)
        changing = [p for p in parameters if p.changes]
        projections = {p.projection for p in changing}
        updates = [_only(factors, projections) for factors in updates]
        moved = any(factors.directions for factors in updates)
        dense = [p for p in changing if p.projection is None and moved]
        engine.merge(updates, (p.weight() for p in dense))
        sent = sum(factors.nbytes for factors in updates) + sum(p.nbytes for p in dense)
        return Sent(sent, self.number)

    def plan(self, parameters: Sequence[PolicyParameter]) -> str:
        """See `SyncMode.plan`."""
        factored = sum(p.projection is not None for p in parameters)
        changing = sum(p.changes for p in parameters)
        return f"{factored} weights travel as factors, {changing - factored} densely"


class SharedSync(SyncMode):
    """Sends nothing: the policy's parameters are views of the engine's weights."""

    name = "shared"
    number = 0.0

    def begin(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> int:
        """Move the policy's weights into the engine's memory."""
        engine.share(policy.model)
        engine.refresh(version=version)
        return 0

    def sync(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> Sent:
        """Let the engine forget what it computed from older weights."""
        if engine.policy_version != version:
            engine.refresh(version=version)
        return Sent(0, self.number)

    def plan(self, parameters: Sequence[PolicyParameter]) -> str:
        """See `SyncMode.plan`."""
        return "all weights are one"


class DenseSync(SyncMode):
    """Sends all weights that train, whole, unless no step of the batch changed one."""

    name = "dense"
    number = 2.0

    def __init__(self) -> None:
        self._changed = False

    def begin(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> int:
        """Send all weights."""
        self._changed = False
        return _load(engine, self.parameters(policy), version)

    def take(self, factors: Factors) -> None:
        """Note whether the step changed weights; empty factors say that it did not."""
        self._changed = self._changed or bool(factors.directions)

    def sync(self, engine: SyncedEngine, policy: TrainedPolicy, *, version: int) -> Sent:
        """Send the weights that train; all weights to an engine that lost them in its sleep."""
        # Without a RowAdam nobody says whether a step changed weights.
        changed, self._changed = self._changed or policy.optimizer is None, False
        parameters = self.parameters(policy)
        if engine.sleep_mode != "weights":
            if engine.policy_version == version or not changed:
                engine.policy_version = version
                return Sent(0, self.number)
            parameters = [p for p in parameters if p.changes]
        return Sent(_load(engine, parameters, version), self.number)

    def plan(self, parameters: Sequence[PolicyParameter]) -> str:
        """See `SyncMode.plan`."""
        return f"{sum(p.changes for p in parameters)} weights travel densely"


def _load(engine: SyncedEngine, parameters: Sequence[PolicyParameter], version: int) -> int:
    """Send whole weights, one at a time, and return their bytes."""
    engine.load((p.weight() for p in parameters), version=version)
    return sum(p.nbytes for p in parameters)


def _only(factors: Factors, projections: set[str | None]) -> Factors:
    """The factors without what is sketched outside the policy, such as a critic."""
    kept = {name: d for name, d in factors.directions.items() if name in projections}
    return replace(factors, directions=kept)
