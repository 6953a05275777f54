"""Which layers are sketched: those named by `targets`, or all linear ones of the decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from logra_lightning.sketch.projection import canonical_name

# What is sketched by default where a model does not tell which its decoder layers are.
DEFAULT_TARGETS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
_ROUTERS = ("gate", "router", "shared_expert_gate")
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def find_targets(
    root: nn.Module,
    targets: Sequence[str] | None = None,
    *,
    option: str = "trainer.strategy.init_args.targets",
) -> dict[str, nn.Linear]:
    """The linear layers to sketch: name to module, in the order of the model.

    For example `targets=["q_proj"]` finds `model.layers.0.self_attn.q_proj` and the `q_proj` of
    every other layer. By default these are all linear layers of the decoder layers of a
    `transformers` model, but for what routes tokens to experts; and those named in
    `DEFAULT_TARGETS` of a model that has no `get_decoder`.

    Args:
        root: the module to search, usually the `LightningModule`.
        targets: last parts of the names of the layers, such as `q_proj`; None for the default.
        option: the option that sets `targets`, for error messages.

    Returns:
        Names without the parts that wrappers insert, and their linear layers.

    Raises:
        ValueError: no linear layer has that name, it is an embedding or the output head, or there
            is no linear layer in the decoder layers.
    """
    if targets is not None and not targets:
        raise ValueError(f"{option} is empty: name at least one layer, such as q_proj")
    forbidden = _embeddings_and_heads(root)
    if targets is None and (layers := list(_decoder_layers(root))):
        chosen = set().union(*(_linear_in(part, experts) for part, experts in layers))
        if not chosen - forbidden:
            raise ValueError(
                f"the decoder layers have no linear layers; {_there_are(root, forbidden)}: set "
                f"{option}"
            )
        return {
            canonical_name(name): module
            for name, module in root.named_modules()
            if isinstance(module, nn.Linear) and module in chosen - forbidden
        }
    return _named(root, DEFAULT_TARGETS if targets is None else targets, forbidden, option)


def _named(
    root: nn.Module, targets: Sequence[str], forbidden: set[nn.Module], option: str
) -> dict[str, nn.Linear]:
    """The linear layers whose names end in one of `targets`."""
    found: dict[str, nn.Linear] = {}
    seen = set()
    for name, module in root.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if leaf not in targets:
            continue
        if module in forbidden:
            raise ValueError(
                f"target {leaf!r} is an embedding or the output head ({name!r}), which cannot be "
                f"sketched: remove it from {option}; it is trained by AdamW with "
                f"model.train_others=true"
            )
        if isinstance(module, nn.Linear):
            found[canonical_name(name)] = module
            seen.add(leaf)
    missing = [target for target in targets if target not in seen]
    if missing:
        raise ValueError(
            f"no linear layer is called {', '.join(map(repr, missing))}; "
            f"{_there_are(root, forbidden)}: set {option}"
        )
    return found


def _there_are(root: nn.Module, forbidden: set[nn.Module]) -> str:
    leaves = {
        name.rsplit(".", 1)[-1]
        for name, module in root.named_modules()
        if isinstance(module, nn.Linear) and module not in forbidden
    }
    return f"this model has {', '.join(sorted(leaves)) or 'no linear layers'}"


def _decoder_layers(root: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The decoder layers of each `transformers` model in `root`, and how many experts one has.

    A model within another one, such as the vision tower of a decoder, is none of its own.
    """
    inner: set[nn.Module] = set()
    for module in root.modules():
        get_decoder = getattr(module, "get_decoder", None)
        if module in inner or not callable(get_decoder):
            continue
        inner.update(module.modules())
        decoder = get_decoder()
        lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
        if lists:
            config = getattr(decoder, "config", None)
            counts = [getattr(config, name, None) or 0 for name in _NUM_EXPERTS]
            yield max(lists, key=_num_weights), max(counts)


def _num_weights(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _linear_in(layers: nn.Module, num_experts: int) -> set[nn.Module]:
    """The linear modules in decoder layers, but for routers and the low-rank parts of adapters."""
    names = dict(layers.named_modules())
    found: set[nn.Module] = set()
    for name, module in names.items():
        parts = name.split(".")
        if not isinstance(module, nn.Linear) or any(part.startswith("lora_") for part in parts):
            continue
        outside = [part for part in parts if part in ("experts", *_ROUTERS)][:1] != ["experts"]
        parent = names[name.rpartition(".")[0]]
        has_experts = hasattr(parent, "experts")
        routes = num_experts > 0 and outside and bool({*parts} & {*_ROUTERS})
        if has_experts and (parts[-1] in _ROUTERS or module.out_features == num_experts):
            routes = True
        if not routes:
            found.add(module)
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
