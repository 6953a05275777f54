"""`SketchBank`: the sums `S [d, r]` of all sketched weights in one flat fp32 buffer (row 2).

One buffer, so that ranks agree by one reduction. The bank knows which projections hold; who fills
it is `capture`, who reads it is `RowAdam`, who says when a step begins is the strategy and the
`SketchAccumulation` callback.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from logra_lightning.sketch.projection import PROJECTIONS, canonical_name, projection_key

DEFAULT_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@dataclass
class SketchedLayer:
    """One sketched weight.

    Args:
        name: of the weight's module, without wrapper parts.
        module: the linear layer.
        total: [d, r] fp32 view of the bank's buffer: `S * sqrt(r)`, since the capture multiplies
            by the bare entries.
        entries: [r, k], the projection times `sqrt(r)`; int8 signs or fp32.
        scale: `1 / sqrt(r)`, which turns `total` into S and `entries` into A.
    """

    name: str
    module: nn.Linear
    total: Tensor
    entries: Tensor
    scale: float

    @property
    def sketch(self) -> Tensor:
        """S [d, r] fp32, a new tensor."""
        return self.total * self.scale

    @property
    def projection(self) -> Tensor:
        """A [r, k] fp32, a new tensor."""
        return self.entries.to(torch.float32) * self.scale

    def gram(self) -> Tensor:
        """`A A^T` [r, r] fp32."""
        entries = self.entries.to(torch.float32)
        return (entries @ entries.t()).mul_(self.scale * self.scale)


def find_targets(root: nn.Module, targets: Sequence[str] = DEFAULT_TARGETS) -> dict[str, nn.Linear]:
    """The linear layers to sketch: canonical module name to module, in the order of the model.

    Args:
        root: usually the `LightningModule`.
        targets: last parts of module names, such as `q_proj`.

    Raises:
        ValueError: a target that no linear layer has, or one that is an embedding or the head.
    """
    if not targets:
        raise ValueError("targets is empty: name at least one, such as q_proj")
    forbidden = _embeddings_and_heads(root)
    found: dict[str, nn.Linear] = {}
    seen = set()
    for name, module in root.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if leaf not in targets:
            continue
        if module in forbidden:
            raise ValueError(
                f"target {leaf!r} is an embedding or the output head ({name!r}), which cannot be "
                f"sketched: remove it from trainer.strategy.init_args.targets; it is trained by "
                f"AdamW with model.train_others=true"
            )
        if isinstance(module, nn.Linear):
            found[canonical_name(name)] = module
            seen.add(leaf)
    missing = [target for target in targets if target not in seen]
    if missing:
        leaves = sorted(
            {
                name.rsplit(".", 1)[-1]
                for name, module in root.named_modules()
                if isinstance(module, nn.Linear) and module not in forbidden
            }
        )
        raise ValueError(
            f"no linear layer is called {', '.join(map(repr, missing))}; this model has "
            f"{', '.join(leaves) or 'no linear layers'}: set trainer.strategy.init_args.targets"
        )
    return found


def _embeddings_and_heads(root: nn.Module) -> set[nn.Module]:
    found: set[nn.Module] = {m for m in root.modules() if isinstance(m, nn.Embedding)}
    for module in root.modules():
        get_head = getattr(module, "get_output_embeddings", None)
        if callable(get_head):
            head = get_head()
            if isinstance(head, nn.Module):
                found.add(head)
    return found | {m for name, m in root.named_modules() if name.rsplit(".", 1)[-1] == "lm_head"}


class SketchBank:
    """All sketches of a model.

    Args:
        modules: canonical name to linear layer, from `find_targets`.
        rank: r, columns of every sketch.
        seed: base seed of the projections.
        projection: `rademacher` or `gaussian`.
        device: where sketches and projections live.

    Attributes:
        step: number of the step that accumulates, None before the first.
        refresh_every: steps for which a projection holds.
        draw: `step // refresh_every`, which fixes the projections.

    Raises:
        ValueError: a rank below 1 or above the in_features of a target.
    """

    def __init__(
        self,
        modules: dict[str, nn.Linear],
        rank: int,
        *,
        seed: int = 0,
        projection: str = "rademacher",
        device: torch.device,
    ) -> None:
        check_rank(modules, rank)
        self.rank = rank
        self.seed = seed
        self.refresh_every = 1
        self.step: int | None = None
        self.projection = projection
        self.draw = -1
        sizes = [m.out_features * rank for m in modules.values()]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        views = self.flat.split(sizes)
        empty = torch.empty(0, dtype=torch.int8, device=device)
        self._sketches = {
            name: SketchedLayer(name, module, view.view(-1, rank), empty, 1.0 / math.sqrt(rank))
            for (name, module), view in zip(modules.items(), views, strict=True)
        }

    def begin_step(self, step: int) -> None:
        """Start optimizer step `step`: sums to zero, projections as they hold for this step.

        Nothing happens when that step has already begun, so it is safe to call this again while
        microbatches accumulate.

        Args:
            step: number of optimizer steps completed so far.
        """
        if step == self.step:
            return
        self.step = step
        self.flat.zero_()
        draw = step // self.refresh_every
        if draw != self.draw:
            for sketch in self:
                key = projection_key(self.seed, draw, sketch.name)
                sketch.entries = PROJECTIONS[self.projection](
                    key, self.rank, sketch.module.in_features, device=self.flat.device
                )
            self.draw = draw

    def require_step(self) -> None:
        """Raise RuntimeError when no step has begun."""
        if self.step is None:
            raise RuntimeError(
                "no step has begun, so no projection holds: add the SketchAccumulation callback "
                "(logra_lightning.callbacks) to the Trainer; on the command line, "
                "sketch_accumulation.enabled=true"
            )

    def fingerprint(self) -> str:
        """Tells banks apart that hold other weights or other projections, 16 hex digits."""
        digest = hashlib.blake2b(digest_size=8)
        for sketch in self:
            digest.update(f"{sketch.name} {tuple(sketch.module.weight.shape)} {self.rank}".encode())
            corner = sketch.entries[:4, :64].to(device="cpu", dtype=torch.float32)
            digest.update(corner.numpy().tobytes())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all sums and projections."""
        projections = sum(s.entries.nbytes for s in self)
        return self.flat.nbytes + projections

    def __iter__(self) -> Iterator[SketchedLayer]:
        return iter(self._sketches.values())

    def __len__(self) -> int:
        return len(self._sketches)

    def __getitem__(self, name: str) -> SketchedLayer:
        return self._sketches[name]


def check_rank(modules: dict[str, nn.Linear], rank: int) -> None:
    """Raise ValueError, naming the narrowest target, when a sketch of this rank makes no sense."""
    name, module = min(modules.items(), key=lambda item: item[1].in_features)
    if not 1 <= rank <= module.in_features:
        raise ValueError(
            f"sketch rank must be between 1 and {module.in_features} (in_features of {name!r}), "
            f"got {rank}: set trainer.strategy.init_args.rank"
        )
