"""`VLLMEngine`: samples with vLLM in the trainer's process (decisions 5.6 and 5.7).

vLLM gets the policy's configuration with dummy weights, then the weights themselves: neither the
model's folder nor its generation config has a say in what is sampled.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from logra_lightning.distributed.processes import num_processes
from logra_lightning.distributed.sharding import is_sharded, whole
from logra_lightning.engines.process_state import (
    default_group_kept,
    process_as_it_was,
    random_state_kept,
)
from logra_lightning.engines.vllm_group import EngineGroup
from logra_lightning.engines.vllm_launch import check_engine_args, launch
from logra_lightning.engines.vllm_watch import names_death, wake_when_dead
from logra_lightning.engines.vllm_worker import decode, encode
from logra_lightning.engines.weights import Block, PolicyWeight, checksum
from logra_lightning.sketch import Factors
from logra_lightning.sketch.projection import canonical_name
from logra_lightning.types import Completion, SamplingParams

_MESSAGE_BYTES = 1 << 28  # of weights in one message


class VLLMEngine:
    """A vLLM engine that lives with the trainer and is updated by `WeightSync`.

    It runs in the trainer's process, unless VLLM_ENABLE_V1_MULTIPROCESSING=1 is set or one rank
    has a `tensor_parallel_size` above 1; then weights travel as bytes. Of several ranks each has an
    engine, or that many of them share one. Sleep and CUDA as a whole are written against vLLM's
    interface and have not run on a GPU.

    Args:
        dtype: of the engine's weights; `auto` takes the policy's. Under `bf16-mixed` the policy's
            weights are fp32, so `bfloat16` here halves the engine.
        gpu_memory_utilization: share of the GPU for weights and key-value cache; 0.3 when left out.
        kv_cache_memory_bytes: size of the key-value cache instead; 1 GiB on a CPU when left out.
        max_model_len: most tokens of prompt and completion; the model's context when left out.
        tensor_parallel_size: GPUs per engine; with several ranks, ranks that share one.
        enforce_eager: no compilation and no CUDA graphs; when left out, so on a CPU.
        sleep: what to give back while training: `none`, `kv` (the cache), or `weights` (cache and
            weights; then every sync sends all weights). Needs CUDA.
        engine_args: any other argument of `vllm.LLM`.

    Raises:
        ValueError: an argument that this class sets itself.
    """

    _running: VLLMEngine | None = None  # the one that runs in this process

    def __init__(
        self,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        sleep: Literal["none", "kv", "weights"] = "none",
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        check_engine_args(engine_args or {})
        self.dtype = dtype
        self.gpu_memory_utilization = gpu_memory_utilization
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.max_model_len = max_model_len
        self.tensor_parallel_size = tensor_parallel_size
        self.enforce_eager = enforce_eager
        self.sleep_mode: Literal["none", "kv", "weights"] = sleep
        self.engine_args = engine_args or {}
        self.policy_version: int | None = None
        self._llm: Any = None
        self._core_in_process = True
        self._in_process = True
        self._shared: list[tuple[str, Parameter, Tensor]] = []
        self.weight_dtype = torch.float32
        self._owns_process_group = False
        self._stop_token_ids: list[int] = []
        self._shapes: dict[str, list[int]] = {}
        self._projections: dict[str, str] = {}
        self._cache_used = False
        self._group: EngineGroup | None = None
        self._asleep: list[str] = []  # what to wake, in this order
        self._weights_lost = False

    # Life.

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        """See `Engine.start`.

        Raises:
            ImportError: vLLM is not installed.
            ValueError: the policy's architecture or dtype cannot be served.
            RuntimeError: another engine runs in this process.
        """
        self.close()
        if VLLMEngine._running is not None:
            raise RuntimeError(
                "vLLM runs one engine per process at a time, and another VLLMEngine is running: "
                "close it first"
            )
        self.weight_dtype = self._choose_dtype(policy)
        self._stop_token_ids = list(stop_token_ids)
        self._owns_process_group = not torch.distributed.is_initialized()
        shares = self.tensor_parallel_size > 1 and num_processes() > 1
        self._group = EngineGroup(self.tensor_parallel_size) if shares else None
        options = {
            "dtype": str(self.weight_dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_sleep_mode": self.sleep_mode != "none",
            "enforce_eager": self.enforce_eager,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
        }
        self._llm, separate = launch(
            policy.config,
            type(policy).__name__.removeprefix("FSDP"),
            options | self.engine_args,
            self._group,
        )
        self._core_in_process = not separate
        alone = self.tensor_parallel_size == 1 or self._group is not None
        self._in_process = not separate and alone
        if self._core_in_process:
            VLLMEngine._running = self
        else:
            wake_when_dead(self._llm.llm_engine.engine_core)
        self.max_model_len = self._llm.llm_engine.model_config.max_model_len
        self._check_policy(policy)
        weights = (PolicyWeight(name, whole(p)) for name, p in _named_parameters(policy))
        self.load(weights, version=0)

    def _choose_dtype(self, policy: Any) -> torch.dtype:
        dtype = policy.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"the policy is in {dtype}, but VLLMEngine serves float32 and bfloat16: set "
                f"model.engine.init_args.dtype"
            )
        return dtype

    def _check_policy(self, policy: nn.Module) -> None:
        """Every weight of the engine has one of the policy, of the same shape and place."""
        device, own = self._call("device")[0], next(policy.parameters()).device.type
        if device != own:
            self.close()
            raise ValueError(
                f"the policy is on {own} and vLLM on {device}, where the same update has other "
                f"bits: set trainer.accelerator so that they agree, or model.engine to "
                f"logra_lightning.engines.TorchEngine"
            )
        self._shapes = self._call("shapes")[0]
        given = {name: list(p.shape) for name, p in _named_parameters(policy)}
        lacking = sorted(set(self._shapes) - set(given))
        unknown = sorted(set(given) - set(self._shapes))
        other = sorted(n for n in set(given) & set(self._shapes) if given[n] != self._shapes[n])
        if lacking or unknown or other:
            self.close()
            raise ValueError(
                f"vLLM's {type(policy).__name__} does not hold the weights of the policy one by "
                f"one: it also expects {_some(lacking)}, does not know {_some(unknown)}, and has "
                f"another shape for {_some(other)}; set model.engine to "
                f"logra_lightning.engines.TorchEngine"
            )

    def close(self) -> None:
        """Shut vLLM down. A process group that was there before it stays."""
        if self._llm is None:
            return
        with process_as_it_was(), default_group_kept(not self._owns_process_group):
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        if VLLMEngine._running is self:
            VLLMEngine._running = None
        self.policy_version = None
        self._asleep, self._weights_lost = [], False
        self._projections, self._shared = {}, []
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # Sampling.

    @names_death
    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        sampling: SamplingParams,
        *,
        num_completions: int,
        seed: int,
    ) -> list[list[Completion]]:
        """See `Engine.generate`.

        What comes out is a function of the weights and the arguments alone, so the prefix cache
        serves the prompts of one call, and a call begins with an empty one.
        """
        from vllm import SamplingParams as VLLMSamplingParams

        if self._llm is None:
            raise RuntimeError("the engine has not been started: call start first")
        if self._weights_lost:
            raise RuntimeError(
                "the engine's weights were given back in its sleep and not sent again: add the "
                "WeightSync callback"
            )
        self._check_lengths(prompt_ids, sampling.max_tokens)
        mine = slice(None)
        if self._group is not None:
            prompt_ids, seed, mine = self._group.gather(prompt_ids, seed)
        if not prompt_ids:
            return []
        self._wake("weights", "kv_cache")
        params = VLLMSamplingParams(
            n=num_completions,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,  # of the drawn token alone
            flat_logprobs=True,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=True,  # what stops is in the list
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": list(ids)} for ids in prompt_ids]
        if self._cache_used:
            self._reset_cache()
        self._cache_used = True
        with random_state_kept():
            # Not a seed per request, which vLLM cannot do on a CPU with chunked prefill.
            self._llm.collective_rpc("logra_seed", args=(seed % (1 << 63),))
            outputs = self._run(prompts, params)
        return [[_completion(c) for c in output.outputs] for output in outputs[mine]]

    def _run(self, prompts: list[Any], params: Any) -> list[Any]:
        if self._in_process:
            return self._llm.generate(prompts, params, use_tqdm=False)
        # Another process would begin while prompts arrive, in batches that depend on their timing.
        self._llm.sleep(level=0)
        self._llm.enqueue(prompts, params, use_tqdm=False)
        self._llm.wake_up(tags=["scheduling"])
        return self._llm.wait_for_completion(use_tqdm=False)

    def _check_lengths(self, prompt_ids: Sequence[list[int]], max_tokens: int) -> None:
        longest = max(map(len, prompt_ids), default=0)
        if self.max_model_len is not None and longest + max_tokens > self.max_model_len:
            raise ValueError(
                f"a prompt of {longest} tokens and completions up to {max_tokens} do not fit the "
                f"engine's {self.max_model_len}: raise model.engine.init_args.max_model_len or "
                f"lower model.sampling.max_tokens"
            )

    # Weights.

    def load(self, weights: Iterable[PolicyWeight], *, version: int) -> None:
        """See `SyncedEngine.load`."""
        self._wake("weights")
        for message in _messages(weights, _MESSAGE_BYTES):
            self._check_names(message)
            self._call("load", message)
            for weight in message:
                self._projections.pop(weight.name, None)
                if weight.projection is not None:
                    self._projections[weight.name] = weight.projection
        self._weights_lost = False
        self.refresh(version=version)

    def merge(self, updates: Sequence[Factors], others: Iterable[PolicyWeight] = ()) -> None:
        """See `SyncedEngine.merge`."""
        if self._weights_lost:
            raise ValueError("factors cannot be merged into weights that were given back in sleep")
        version = self.policy_version
        for factors in updates:
            if factors.version != version:
                raise ValueError(
                    f"the engine holds policy version {version}, the next factors are for "
                    f"{factors.version}: load all weights instead"
                )
            version += 1
            self._check_directions(factors)
        others = list(others)
        assert version is not None
        if not others and not any(factors.directions for factors in updates):
            self.policy_version = version
            return
        self._check_names(others)
        self._wake("weights")
        self._call("merge", list(updates), others)
        self.refresh(version=version)

    def refresh(self, *, version: int) -> None:
        """See `SyncedEngine.refresh`.

        Raises:
            RuntimeError: a shared parameter has been given other memory.
        """
        for name, parameter, view in self._shared:
            if parameter.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    f"{name!r} no longer shares its memory with the engine: something replaced it, "
                    f"such as a call of .to() on the policy; use weight_sync.mode=factors"
                )
        self._reset_cache()
        self.policy_version = version

    @names_death
    def _reset_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache, which is still in use")
        self._cache_used = False

    def share(self, policy: nn.Module) -> None:
        """See `SyncedEngine.share`.

        The policy's parameters stay the same objects; only their memory changes, so optimizers and
        hooks keep working. Anything that replaces that memory again ends the sharing.
        """
        reason = self._why_not_shared(policy)
        if reason:
            raise ValueError(f"the engine cannot share weights with the policy: {reason}")
        views: dict[str, Tensor] = self._call("views")[0]
        for name, parameter in _named_parameters(policy):
            view = views[name]
            view.copy_(parameter.data)
            parameter.data = view
            self._shared.append((name, parameter, view))
        self.refresh(version=self.policy_version or 0)

    def _why_not_shared(self, policy: nn.Module) -> str:
        if not self._in_process or self._group is not None:
            return "it runs in other processes; use weight_sync.mode=factors"
        if self.sleep_mode == "weights":
            return "sleep=weights would give them back; set sleep to none or kv"
        for name, parameter in _named_parameters(policy):
            if parameter.dtype != self.weight_dtype:
                return (
                    f"{name!r} is {parameter.dtype} in the policy and {self.weight_dtype} in the "
                    f"engine; set model.engine.init_args.dtype=auto or weight_sync.mode=factors"
                )
            if is_sharded(parameter):
                return f"each rank has a part of {name!r}; use weight_sync.mode=factors"
        views = self._call("views")[0]
        missing = [name for name, _ in _named_parameters(policy) if name not in views]
        if missing:
            return f"the engine does not hold {_some(missing)} in one piece"
        return ""

    def differing(self, weights: Iterable[PolicyWeight]) -> list[str]:
        """See `SyncedEngine.differing`."""
        held: dict[str, list[tuple[Block, int]]] = {}
        for worker in self._call("checksums"):
            for name, block, value in worker:
                held.setdefault(name, []).append((block, value))
        names = []
        for weight in weights:
            tensor = weight.tensor
            if weight.projection is None:
                tensor = tensor.to(self.weight_dtype)
            for block, value in held.pop(weight.name, []):
                low = None if weight.residual is None else block.of(weight.residual)
                if checksum(block.of(tensor), low) != value:
                    names.append(weight.name)
                    break
        return names

    def _check_names(self, weights: Iterable[PolicyWeight]) -> None:
        wrong = []
        for weight in weights:
            expected, given = self._shapes.get(weight.name), list(weight.tensor.shape)
            if expected != given:
                other = f" but {expected}" if expected else ""
                wrong.append(f"{weight.name!r} of shape {given}{other}")
        if wrong:
            raise ValueError(f"the engine has no weight {', '.join(wrong)}")

    def _check_directions(self, factors: Factors) -> None:
        expected, given = set(self._projections.values()), set(factors.directions)
        if given and expected != given:
            unknown, missing = sorted(given - expected), sorted(expected - given)
            raise ValueError(
                f"the factors of policy version {factors.version} do not fit the engine's weights: "
                f"unknown {', '.join(unknown) or 'none'}; missing {', '.join(missing) or 'none'}"
            )

    @names_death
    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """One answer per worker."""
        message = arguments if self._in_process else encode(arguments)
        answers = self._llm.collective_rpc("logra_call", args=(method, message))
        return answers if self._in_process else [decode(answer) for answer in answers]

    # Sleep.

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        if self.sleep_mode == "none" or self._llm is None or self._asleep:
            return
        if self.sleep_mode == "kv":
            if self._core_in_process:
                self._llm.llm_engine.step()  # lets the scheduler forget its finished requests
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()
            self._asleep = ["kv_cache"]
        else:
            self._llm.sleep(level=2)
            self._asleep = ["weights", "kv_cache"]
            self._weights_lost = True

    def _wake(self, *tags: str) -> None:
        for tag in [tag for tag in self._asleep if tag in tags]:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)


def _completion(output: Any) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
    logprobs = torch.tensor(output.logprobs.logprobs, dtype=torch.float32, device="cpu")
    return Completion(list(output.token_ids), logprobs, truncated=output.finish_reason == "length")


def _messages(weights: Iterable[PolicyWeight], limit: int) -> Iterator[list[PolicyWeight]]:
    """Weights in lists of about `limit` bytes, so that a stream of them never exists at once."""
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


def _named_parameters(policy: nn.Module) -> Iterator[tuple[str, Parameter]]:
    return ((canonical_name(name), p) for name, p in policy.named_parameters())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) or "none") + more
