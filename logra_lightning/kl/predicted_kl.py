r"""The KL change of a step, predicted before it is taken and measured without taking it.

Rows 5 and 6 of the method. With z the logits, T the temperature and dz the derivative of z along
the update, a step of scale a costs per completion token

.. math:: a^2 q, \qquad q = \mathrm{mean}\ \tfrac12 \mathrm{Var}_{\mathrm{softmax}(z/T)}(dz/T)

nats, to second order. `measured_kl` gives the KL of the very update, to all orders.

Source: LoGRA, arXiv 2610.06647.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

from logra_lightning.distributed.sharding import squared_norms
from logra_lightning.kl.inject import Change, injected_tangents, injected_update


@dataclass(frozen=True)
class KLProbe:
    """Completion tokens on which the KL of a step is taken.

    Args:
        model: that is run; errors name its modules.
        forwards: each runs the model on some of the tokens and returns the final hidden states
            [T, H] at the positions that predict them.
        logits: [n, H] hidden states to [n, V] logits, divided by the temperature.
        prepared: what must hold while the model runs and `logits` is used, such as plain attention.
        mismatch: mean of rollout logprobs minus logprobs over the step's tokens, in nats, or None.
    """

    model: nn.Module
    forwards: Sequence[Callable[[], Tensor]]
    logits: Callable[[Tensor], Tensor]
    prepared: Callable[[], AbstractContextManager[None]] = nullcontext
    mismatch: float | None = None

    @property
    def device(self) -> torch.device:
        """Of the model; a rank without rollouts has no hidden states to tell it."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @torch.no_grad()
    def hidden(self, changes: Sequence[Change] = ()) -> list[Tensor]:
        """Final hidden states, as they are or with an update injected."""
        with self.prepared(), injected_update(changes):
            return [forward() for forward in self.forwards]


@torch.no_grad()
def tangents(probe: KLProbe, changes: Sequence[Change]) -> list[tuple[Tensor, Tensor]]:
    """Hidden states [T, H] and their derivatives along the update, in one pass of forward-mode AD.

    Raises:
        NotImplementedError: an operation has no forward-mode derivative.
    """
    pairs = []
    with probe.prepared(), injected_tangents(changes), _named_errors(probe.model):
        for forward in probe.forwards:
            primal, tangent = fwAD.unpack_dual(forward())
            pairs.append((primal, torch.zeros_like(primal) if tangent is None else tangent))
    return pairs


@torch.no_grad()
def finite_differences(
    probe: KLProbe, changes: Sequence[Change], *, step: float
) -> list[tuple[Tensor, Tensor]]:
    """As `tangents`, from two plain forward passes: central differences.

    Args:
        probe: where.
        changes: the update.
        step: how much of the update; see `difference_step`.
    """
    up, down = (
        probe.hidden([Change(c.layer, c.direction * h, c.rate * h) for c in changes])
        for h in (step, -step)
    )
    return [((a + b) / 2, (a - b) / (2 * step)) for a, b in zip(up, down, strict=True)]


def difference_step(changes: Sequence[Change]) -> float:
    """How much of an update changes the weights by a thousandth.

    Smaller ones drown in rounding: norms and softmax are computed in fp32 whatever the model's
    dtype. The norm of `D A` is estimated by that of D.
    """
    update = sum(
        square * change.layer.module.in_features * change.layer.scale**2
        for change, square in zip(
            changes, squared_norms([c.direction for c in changes]), strict=True
        )
    )
    weights = sum(squared_norms([change.layer.module.weight for change in changes]))
    return 1e-3 * (weights / update) ** 0.5 if update > 0 and weights > 0 else 1.0


@torch.no_grad()
def predicted_kl(
    probe: KLProbe, pairs: Sequence[tuple[Tensor, Tensor]], *, chunk_tokens: int = 64
) -> Tensor:
    """[2] fp64: the sum of `1/2 Var(dz / T)` over all tokens, and their number.

    Args:
        probe: gives the logits.
        pairs: hidden states and their tangents.
        chunk_tokens: tokens whose logits exist at the same time.
    """
    total = torch.zeros((), dtype=torch.float64, device=probe.device)
    count = 0
    for hidden, tangent in pairs:
        for h, dh in zip(hidden.split(chunk_tokens), tangent.split(chunk_tokens), strict=True):
            with fwAD.dual_level():
                z, dz = fwAD.unpack_dual(probe.logits(fwAD.make_dual(h, dh)))
                total += half_variance(z, dz).sum()
            count += h.shape[0]
    return torch.stack([total, total.new_tensor(count)])


def half_variance(logits: Tensor, tangent: Tensor) -> Tensor:
    """[n] fp64, `1/2 Var_softmax(z)(dz)` of each row of [n, V]."""
    p = torch.softmax(logits.to(torch.float64), dim=-1)
    dz = tangent.to(torch.float64)
    centered = dz - (p * dz).sum(dim=-1, keepdim=True)
    return (p * centered.square()).sum(dim=-1) / 2


@torch.no_grad()
def measured_kl(
    probe: KLProbe, old: Sequence[Tensor], new: Sequence[Tensor], *, chunk_tokens: int = 64
) -> Tensor:
    """[2] fp64: the sum of KL(old || new) over all tokens in nats, and their number.

    Args:
        probe: gives the logits.
        old: hidden states before the update.
        new: the same with the update injected.
        chunk_tokens: tokens whose logits exist at the same time.
    """
    total = torch.zeros((), dtype=torch.float64, device=probe.device)
    count = 0
    for before, after in zip(old, new, strict=True):
        for a, b in zip(before.split(chunk_tokens), after.split(chunk_tokens), strict=True):
            total += kl_divergence(probe.logits(a), probe.logits(b)).sum()
            count += a.shape[0]
    return torch.stack([total, total.new_tensor(count)])


def kl_divergence(logits: Tensor, other: Tensor) -> Tensor:
    """[n] fp64, KL(softmax(z) || softmax(z')) in nats of each row of [n, V]."""
    log_p = torch.log_softmax(logits.to(torch.float64), dim=-1)
    log_q = torch.log_softmax(other.to(torch.float64), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _drop_last(modules: list[nn.Module]) -> None:
    modules.pop()


@contextmanager
def _named_errors(model: nn.Module) -> Iterator[None]:
    """Name the module in which forward-mode AD ends."""
    running: list[nn.Module] = []
    enter = nn.modules.module.register_module_forward_pre_hook(lambda m, _: running.append(m))
    leave = nn.modules.module.register_module_forward_hook(lambda *_: _drop_last(running))
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if "forward AD" not in str(error) and "jvp" not in str(error):
            raise
        names = {module: name for name, module in model.named_modules()}
        where = next((names[m] for m in reversed(running) if names.get(m)), type(model).__name__)
        raise NotImplementedError(
            f"an operation in {where!r} has no forward-mode derivative ({error}): set "
            f"kl_budget.method=finite_difference"
        ) from error
    finally:
        enter.remove()
        leave.remove()


@torch.no_grad()
def first_not_finite(probe: KLProbe) -> str:
    """Name of the first module of the model whose output is not finite; empty where all are."""
    found: list[str] = []
    names = {module: name for name, module in probe.model.named_modules()}

    def look(module: nn.Module, _: object, output: object) -> None:
        if isinstance(output, Tensor) and module in names and not torch.isfinite(output).all():
            found.append(names[module])

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        probe.hidden()
    finally:
        handle.remove()
    return found[0] if found else ""
