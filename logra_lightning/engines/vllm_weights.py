"""The trainer's end of the weights of a vLLM engine; `vllm_worker` is the other end.

`VLLMWeights` sends weights and factors to the workers and asks them what they hold. Names and
shapes are checked here, before anything is sent. Which weights have masters, and by which
projections, only the workers know: they refuse factors that do not fit in their answer to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from logra_lightning.distributed.sharding import is_sharded
from logra_lightning.engines.vllm_watch import names_death
from logra_lightning.engines.vllm_worker import decode, encode
from logra_lightning.engines.weights import Block, PolicyWeight, checksum, named_parameters
from logra_lightning.names import named
from logra_lightning.sketch import Factors

_MESSAGE_BYTES = 1 << 28


class VLLMWeights:
    """The weights that the workers of one running vLLM engine hold.

    Args:
        llm: a `vllm.LLM` whose workers have `vllm_worker.WorkerExtension`.
        dtype: dtype of the engine's weights.
        in_process: whether this process runs the worker. Messages are then passed as they are,
            otherwise as bytes.

    Attributes:
        shapes: name to shape of each weight that the policy must have.
    """

    def __init__(self, llm: Any, dtype: torch.dtype, *, in_process: bool) -> None:
        self.dtype = dtype
        self.in_process = in_process
        self._llm = llm
        self._shared: list[tuple[str, Parameter, Tensor]] = []
        self.shapes: dict[str, list[int]] = self.call("shapes")[0]

    @names_death
    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each worker's `WeightReceiver`; one answer per worker."""
        message = arguments if self.in_process else encode(arguments)
        answers = self._llm.collective_rpc("logra_call", args=(method, message))
        return answers if self.in_process else [decode(answer) for answer in answers]

    def check_policy(self, policy: nn.Module) -> None:
        """Raise ValueError unless the engine has the policy's device, weights and shapes."""
        device, own = self.call("device")[0], str(next(policy.parameters()).device)
        if device != own:
            raise ValueError(
                f"the policy is on {own} and vLLM on {device}, where the same update may have "
                f"other bits: set trainer.accelerator and trainer.devices so that they agree, or "
                f"model.engine to logra_lightning.engines.TorchEngine"
            )
        given = {name: list(p.shape) for name, p in named_parameters(policy)}
        lacking = sorted(set(self.shapes) - set(given))
        unknown = sorted(set(given) - set(self.shapes))
        other = sorted(n for n in set(given) & set(self.shapes) if given[n] != self.shapes[n])
        if lacking or unknown or other:
            raise ValueError(
                f"vLLM's {type(policy).__name__} does not hold the weights of the policy one by "
                f"one: it also expects {named(lacking)}, does not know {named(unknown)}, and has "
                f"another shape for {named(other)}; set model.engine to "
                f"logra_lightning.engines.TorchEngine"
            )

    def load(self, weights: Iterable[PolicyWeight]) -> None:
        """Replace weights, a few at a time; those with a projection get exact masters.

        Raises:
            ValueError: a weight has a name or a shape that the engine does not know.
        """
        for message in messages(weights, _MESSAGE_BYTES):
            self._check_shapes(message)
            self.call("load", message)

    def merge(self, updates: Sequence[Factors], others: Sequence[PolicyWeight]) -> None:
        """Merge updates into the masters, in order, then replace the other weights.

        Raises:
            ValueError: the directions of an update are not exactly those of the masters, or one
                of `others` has a name or a shape that the engine does not know. Nothing is merged.
        """
        self._check_shapes(others)
        for misfit in self.call("merge", list(updates), list(others)):
            if misfit is not None:
                version, unknown, missing = misfit
                raise ValueError(
                    f"the factors of policy version {version} do not fit the engine's weights: "
                    f"unknown {named(unknown)}; missing {named(missing)}"
                )

    def _check_shapes(self, weights: Iterable[PolicyWeight]) -> None:
        wrong = []
        for weight in weights:
            expected, given = self.shapes.get(weight.name), list(weight.tensor.shape)
            if expected != given:
                other = f" but {expected}" if expected else ""
                wrong.append(f"{weight.name!r} of shape {given}{other}")
        if wrong:
            raise ValueError(f"the engine has no weight {', '.join(wrong)}")

    def why_not_shared(self, policy: nn.Module) -> str:
        """The reason why the policy cannot share its memory with the engine; empty if it can.

        A weight that stays as it is need not be shared.
        """
        views = self.call("views")[0]
        for name, parameter in named_parameters(policy):
            if not _to_share(parameter, views.get(name)):
                continue
            if parameter.dtype != self.dtype:
                return (
                    f"{name!r} is {parameter.dtype} in the policy and {self.dtype} in the engine; "
                    f"set model.engine.init_args.dtype to that of the policy, or "
                    f"weight_sync.mode=factors"
                )
            if is_sharded(parameter):
                return f"each process has a part of {name!r}; use weight_sync.mode=factors"
            if name in views and views[name].dtype != parameter.dtype:
                return (
                    f"{name!r} is {views[name].dtype} in the engine; set model.train_others=false"
                )
        missing = [name for name, _ in named_parameters(policy) if name not in views]
        return f"the engine does not hold {named(missing)} in one piece" if missing else ""

    def share(self, policy: nn.Module) -> None:
        """Move the policy's values into the engine's memory, where both use them from now on.

        The parameters stay the same objects, so optimizers and hooks keep working.
        """
        views: dict[str, Tensor] = self.call("views")[0]
        for name, parameter in named_parameters(policy):
            view = views[name]
            view.copy_(parameter.data)
            if not _to_share(parameter, view):
                continue
            parameter.data = view
            self._shared.append((name, parameter, view))

    def release(self) -> None:
        """Give shared parameters memory of their own again, and let the workers forget theirs."""
        for _, parameter, view in self._shared:
            if parameter.data_ptr() == view.data_ptr():
                parameter.data = view.clone()
        self._shared.clear()
        self._llm.collective_rpc("logra_release", args=())

    def check_shared(self) -> None:
        """Raise RuntimeError if a parameter that was shared has been given other memory since."""
        for name, parameter, view in self._shared:
            if parameter.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    f"{name!r} no longer shares its memory with the engine: something replaced it, "
                    f"such as a call of .to() on the policy; use weight_sync.mode=factors"
                )

    def differing(self, weights: Iterable[PolicyWeight]) -> list[str]:
        """Names of the given weights of which some worker holds other bits, masters included."""
        held: dict[str, list[tuple[Block, torch.dtype, int]]] = {}
        for worker in self.call("checksums"):
            for name, block, dtype, value in worker:
                held.setdefault(name, []).append((block, dtype, value))
        names = []
        for weight in weights:
            for block, dtype, value in held.pop(weight.name, []):
                tensor = block.of(weight.tensor)
                if weight.projection is None:  # vLLM keeps some weights of bf16 models in fp32
                    tensor = tensor.to(dtype)
                low = None if weight.residual is None else block.of(weight.residual)
                if checksum(tensor, low) != value:
                    names.append(weight.name)
                    break
        return names


def _to_share(parameter: Parameter, view: Tensor | None) -> bool:
    """Whether it trains, or can be shared as it is: vLLM keeps some frozen weights in fp32."""
    return parameter.requires_grad or view is None or view.dtype == parameter.dtype


def messages(weights: Iterable[PolicyWeight], limit: int) -> Iterator[list[PolicyWeight]]:
    """Put weights into lists of about `limit` bytes, so that few of them are in memory at once.

    A list ends with the weight that reaches the limit: weights of 5, 5, 5 and 5 bytes with a limit
    of 8 give `[5, 5], [5, 5]`, with a limit of 5 four lists.
    """
    message: list[PolicyWeight] = []
    size = 0
    for weight in weights:
        message.append(weight)
        size += weight.nbytes
        if size >= limit:
            yield message
            message, size = [], 0
    if message:
        yield message
