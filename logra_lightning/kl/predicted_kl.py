r"""The KL of a step, predicted to second order before it is made (row 5 of docs/method.md).

With z the logits, T the temperature and dz the derivative of z along the update of scale 1, a step
of scale a changes the policy by a KL of

.. math:: a^2 q, \qquad q = \mathrm{mean}\ \tfrac12 \mathrm{Var}_{\mathrm{softmax}(z/T)}(dz/T)

nats per completion token.

Source: LoGRA, arXiv 2610.06647.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

from logra_lightning.distributed.sharding import squared_norms
from logra_lightning.kl.inject import Change, injected_tangents
from logra_lightning.kl.kl_probe import KLProbe


@torch.no_grad()
def tangents(
    probe: KLProbe, changes: Sequence[Change], *, at: float = 0.0
) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and their exact derivatives along the update, by forward-mode AD.

    Args:
        probe: the tokens, and how to run the model on them.
        changes: the update.
        at: the fraction of the update after which both are taken: 0 for the weights as they are.

    Returns:
        For each of `probe.forwards` the hidden states [T, H] and their derivatives [T, H].

    Raises:
        NotImplementedError: an operation of the model has no forward-mode derivative.
    """
    pairs = []
    with probe.prepared(), injected_tangents(changes, at), _named_errors(probe.model):
        for forward in probe.forwards:
            primal, tangent = fwAD.unpack_dual(forward())
            pairs.append((primal, torch.zeros_like(primal) if tangent is None else tangent))
    return pairs


@torch.no_grad()
def finite_differences(
    probe: KLProbe, changes: Sequence[Change], *, step: float
) -> list[tuple[Tensor, Tensor]]:
    """As `tangents`, but approximate, by central differences of two plain forward passes.

    Args:
        probe: the tokens, and how to run the model on them.
        changes: the update, of scale 1.
        step: step scale of the two passes, forwards and backwards; see `difference_step`.

    Returns:
        For each of `probe.forwards` the hidden states [T, H] and their derivatives [T, H].
    """
    up, down = (
        probe.hidden(
            [Change(c.layer, partial(_times, c.direction, h), c.rate * h) for c in changes]
        )
        for h in (step, -step)
    )
    return [((a + b) / 2, (a - b) / (2 * step)) for a, b in zip(up, down, strict=True)]


def difference_step(changes: Sequence[Change]) -> float:
    """The step scale at which an update has a thousandth of the norm of the weights.

    A difference over less is mostly rounding: models compute norms and softmax in fp32, whatever
    their dtype. The norm of `D A` is estimated from that of D, the entries of A being
    `+-1 / sqrt(r)`.

    Args:
        changes: the update, of scale 1.
    """
    update = sum(
        squared_norms([c.direction()])[0] * c.layer.module.in_features * c.layer.scale**2
        for c in changes
    )
    weights = sum(squared_norms([change.layer.module.weight for change in changes]))
    return 1e-3 * (weights / update) ** 0.5 if update > 0 and weights > 0 else 1.0


def _times(direction: Callable[[], Tensor], factor: float) -> Tensor:
    return direction() * factor


@torch.no_grad()
def predicted_kl(
    probe: KLProbe, pairs: Sequence[tuple[Tensor, Tensor]], *, chunk_tokens: int | None = None
) -> Tensor:
    r"""The sum of :math:`\tfrac12 \mathrm{Var}(dz/T)` over the tokens; over their number it is q.

    Args:
        probe: turns hidden states into logits.
        pairs: hidden states [T, H] and their derivatives [T, H], from `tangents`.
        chunk_tokens: number of tokens whose logits [chunk_tokens, V] exist at a time; None takes
            `probe.chunk_tokens`.

    Returns:
        [2] fp64: the sum in nats, and the number of tokens.
    """
    total = torch.zeros((), dtype=torch.float64, device=probe.device)
    count = 0
    for hidden, tangent in pairs:
        chunk = chunk_tokens or probe.chunk_tokens(hidden)
        for h, dh in zip(hidden.split(chunk), tangent.split(chunk), strict=True):
            total += half_variance(*logit_tangents(probe, h, dh)).sum()
            count += h.shape[0]
    return torch.stack([total, total.new_tensor(count)])


def logit_tangents(probe: KLProbe, hidden: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [n, V] and their derivatives [n, V].

    Args:
        probe: turns hidden states into logits.
        hidden: [n, H] hidden states.
        tangent: [n, H], their derivatives.
    """
    with fwAD.dual_level():
        z, dz = fwAD.unpack_dual(probe.logits(fwAD.make_dual(hidden, tangent)))
        return z, dz


def half_variance(logits: Tensor, tangent: Tensor) -> Tensor:
    r""":math:`\tfrac12 \mathrm{Var}_{\mathrm{softmax}(z)}(dz)` of each row.

    Args:
        logits: z [n, V].
        tangent: dz [n, V].

    Returns:
        [n] fp64, nats.
    """
    p = torch.softmax(logits.to(torch.float64), dim=-1)
    dz = tangent.to(torch.float64)
    centered = dz - (p * dz).sum(dim=-1, keepdim=True)
    return (p * centered.square()).sum(dim=-1) / 2


def _drop_last(modules: list[nn.Module]) -> None:
    modules.pop()


@contextmanager
def _named_errors(model: nn.Module) -> Iterator[None]:
    """Within it, the error of an operation without a derivative names the module it is in."""
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
