"""`VLLMEngine`: samples with vLLM in the trainer's process; its life, its sampling, its sleep.

vLLM gets the policy's config and dummy weights, then the policy's weights from us. So neither the
model's folder nor its generation config has a say in what is sampled. How weights travel is in
`vllm_weights`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from logra_lightning.distributed.processes import num_processes
from logra_lightning.distributed.sharding import whole
from logra_lightning.engines.process_state import (
    default_group_kept,
    plain_torch,
    process_as_it_was,
    random_state_kept,
)
from logra_lightning.engines.vllm_group import EngineGroup
from logra_lightning.engines.vllm_launch import check_engine_args, launch
from logra_lightning.engines.vllm_watch import names_death, wake_when_dead
from logra_lightning.engines.vllm_weights import VLLMWeights
from logra_lightning.engines.weights import PolicyWeight, named_parameters
from logra_lightning.sketch import Factors
from logra_lightning.types import Completion, SamplingParams


class VLLMEngine:
    """A vLLM engine that lives beside the trainer and is kept up to date by `WeightSync`.

    What needs CUDA (sleep, and vLLM on a GPU as such) is written against vLLM's interface and has
    not been run on a GPU.

    The engine runs in the trainer's process. It runs in processes of its own, to which weights
    travel as bytes, if VLLM_ENABLE_V1_MULTIPROCESSING=1 is set, or if training runs in one process
    and `tensor_parallel_size` is above 1. Where several processes train together, each has its own
    engine, or `tensor_parallel_size` of them share one.

    Args:
        dtype: dtype of the engine's weights; `auto` takes the one that the policy computes in:
            `bfloat16` under `bf16-mixed`, otherwise that of its weights.
        gpu_memory_utilization: share of the GPU's memory for weights and key-value cache together;
            0.3 when left out.
        kv_cache_memory_bytes: size of the key-value cache in bytes, in place of a share; 1 GiB on a
            CPU when left out.
        max_model_len: largest number of tokens of a prompt and its completion together; when left
            out, as many as the longest prompt of the data and the longest completion have, and
            where these are not known, the model's context length.
        tensor_parallel_size: number of GPUs per engine. Where several processes train together,
            it is the number of processes that share an engine.
        enforce_eager: switch compilation and CUDA graphs off; when left out, they are off on a CPU.
        sleep: what to give back while the policy trains: `none`, `kv` (the key-value cache) or
            `weights` (cache and weights, so that every sync sends all weights). Needs CUDA.
        engine_args: any other arguments of `vllm.LLM`.

    Raises:
        ValueError: `engine_args` has an argument that this class sets itself.
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
        self.weight_dtype = torch.float32
        self._compute_dtype: torch.dtype | None = None
        self._longest: int | None = None  # what the run needs
        self._limit: int | None = None  # what the running engine takes
        self._llm: Any = None
        self._weights: VLLMWeights | None = None
        self._core_in_process = True
        self._owns_process_group = False
        self._group: EngineGroup | None = None
        self._stop_token_ids: list[int] = []
        self._cache_used = False
        self._asleep: list[str] = []  # what to wake, in this order
        self._weights_lost = False

    # Life.

    def expect(self, *, longest: int | None, dtype: torch.dtype | None) -> None:
        """Take note of what the run will ask for; see the module `engine`."""
        self._longest, self._compute_dtype = longest, dtype

    def start(self, policy: nn.Module, stop_token_ids: Sequence[int]) -> None:
        """See `Engine.start`.

        Raises:
            ImportError: vLLM is not installed.
            ValueError: vLLM cannot serve the policy's architecture, dtype or device.
            RuntimeError: another `VLLMEngine` runs in this process.
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
        is_shared = self.tensor_parallel_size > 1 and num_processes() > 1
        self._group = EngineGroup(self.tensor_parallel_size) if is_shared else None
        try:
            self._launch(policy)
            self._started().check_policy(policy)
            weights = (PolicyWeight(name, whole(p)) for name, p in named_parameters(policy))
            self.load(weights, version=0)
        except BaseException:
            self.close()
            raise

    def _choose_dtype(self, policy: Any) -> torch.dtype:
        if self.dtype == "auto":
            dtype = self._compute_dtype or policy.dtype
        else:
            dtype = getattr(torch, self.dtype)
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"the policy is in {dtype}, but VLLMEngine serves float32 and bfloat16: set "
                f"model.engine.init_args.dtype"
            )
        return dtype

    def _launch(self, policy: Any) -> None:
        options = {
            "dtype": str(self.weight_dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len or self._longest,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_sleep_mode": self.sleep_mode != "none",
            "enforce_eager": self.enforce_eager,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_cache_memory_bytes,
        }
        architecture = type(policy).__name__.removeprefix("FSDP")
        self._llm, separate = launch(
            policy.config,
            architecture,
            options | self.engine_args,
            next(policy.parameters()).device,
            self._group,
        )
        self._core_in_process = not separate
        if self._core_in_process:
            VLLMEngine._running = self
        else:
            wake_when_dead(self._llm.llm_engine.engine_core)
        self._limit = self._llm.llm_engine.model_config.max_model_len
        one_worker = self.tensor_parallel_size == 1 or self._group is not None
        self._weights = VLLMWeights(
            self._llm, self.weight_dtype, in_process=self._core_in_process and one_worker
        )

    def close(self) -> None:
        """Shut vLLM down; a process group that was there before it stays."""
        if self._llm is None:
            return
        if self._weights is not None and self.sleep_mode != "none":
            self._weights.release()  # vLLM then drops the memory, whoever still looks at it
        with process_as_it_was(), default_group_kept(not self._owns_process_group):
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._weights = None
        if VLLMEngine._running is self:
            VLLMEngine._running = None
        self.policy_version = None
        self._asleep, self._weights_lost = [], False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _started(self) -> VLLMWeights:
        """The engine's weights; raises RuntimeError before `start`."""
        if self._weights is None:
            raise RuntimeError("the engine has not been started: call start first")
        return self._weights

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

        A call begins with an empty prefix cache, which then serves the prompts of this call alone:
        completions depend on nothing but the weights and the arguments.

        Raises:
            ValueError: a prompt and its completion would be longer than `max_model_len`.
            RuntimeError: the engine has not been started, or it has no weights since its sleep.
        """
        from vllm import SamplingParams as VLLMSamplingParams

        self._started()
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
        self._wake("kv_cache")
        params = VLLMSamplingParams(
            n=num_completions,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            logprobs=0,  # only the drawn token's
            flat_logprobs=True,
            stop_token_ids=self._stop_token_ids,
            ignore_eos=True,  # all tokens that stop are in the list
            detokenize=False,
        )
        prompts = [{"prompt_token_ids": list(ids)} for ids in prompt_ids]
        if self._cache_used:
            self._reset_cache()
        self._cache_used = True
        with random_state_kept(), plain_torch():
            # Not a seed per request, which vLLM cannot do on a CPU with chunked prefill.
            self._llm.collective_rpc("logra_seed", args=(seed % (1 << 63),))
            outputs = self._run(prompts, params)
        return [[_completion(c) for c in output.outputs] for output in outputs[mine]]

    def _run(self, prompts: list[Any], params: Any) -> list[Any]:
        if self._started().in_process:
            return self._llm.generate(prompts, params, use_tqdm=False)
        # Another process would begin while prompts arrive, in batches that depend on their timing.
        self._llm.sleep(level=0)
        self._llm.enqueue(prompts, params, use_tqdm=False)
        self._llm.wake_up(tags=["scheduling"])
        return self._llm.wait_for_completion(use_tqdm=False)

    def _check_lengths(self, prompt_ids: Sequence[list[int]], max_tokens: int) -> None:
        longest = max(map(len, prompt_ids), default=0)
        if self._limit is not None and longest + max_tokens > self._limit:
            raise ValueError(
                f"a prompt of {longest} tokens and completions up to {max_tokens} do not fit the "
                f"engine's {self._limit}: raise model.engine.init_args.max_model_len or "
                f"lower model.sampling.max_tokens"
            )

    # Weights.

    def load(self, weights: Iterable[PolicyWeight], *, version: int) -> None:
        """See `SyncedEngine.load`."""
        held = self._started()
        self._wake("weights")
        held.load(weights)
        self._weights_lost = False
        self.refresh(version=version)

    def merge(self, updates: Sequence[Factors], others: Iterable[PolicyWeight] = ()) -> None:
        """See `SyncedEngine.merge`."""
        held = self._started()
        if self._weights_lost:
            raise ValueError("factors cannot be merged into weights that were given back in sleep")
        version = self.policy_version
        assert version is not None
        for factors in updates:
            if factors.version != version:
                raise ValueError(
                    f"the engine holds policy version {version}, the next factors are for "
                    f"{factors.version}: load all weights instead"
                )
            version += 1
        others = list(others)
        if others or any(factors.directions for factors in updates):
            held.merge(updates, others)
            self.refresh(version=version)
        self.policy_version = version

    def refresh(self, *, version: int) -> None:
        """See `SyncedEngine.refresh`.

        Raises:
            RuntimeError: a shared parameter has been given other memory.
        """
        self._started().check_shared()
        self._reset_cache()
        self.policy_version = version

    @names_death
    def _reset_cache(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM could not reset its prefix cache, which is still in use")
        self._cache_used = False

    def share(self, policy: nn.Module) -> None:
        """See `SyncedEngine.share`.

        Anything that gives a parameter other memory later, such as `.to()`, ends the sharing; the
        next `refresh` then raises a RuntimeError.
        """
        held = self._started()
        if not held.in_process or self._group is not None:
            reason = "it runs in other processes; use weight_sync.mode=factors"
        elif self.sleep_mode == "weights":
            reason = "sleep=weights would give them back; set sleep to none or kv"
        else:
            reason = held.why_not_shared(policy)
        if reason:
            raise ValueError(f"the engine cannot share weights with the policy: {reason}")
        held.share(policy)
        self.refresh(version=self.policy_version or 0)

    def differing(self, weights: Iterable[PolicyWeight]) -> list[str]:
        """See `SyncedEngine.differing`."""
        return self._started().differing(weights)

    # Sleep.

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        if self.sleep_mode == "none" or self._llm is None or self._asleep:
            return
        if self.sleep_mode == "kv":
            if self._core_in_process:
                self._drain()
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()
            self._asleep = ["kv_cache"]
        else:
            self._llm.sleep(level=2)
            self._asleep = ["weights", "kv_cache"]
            self._weights_lost = True

    def _drain(self) -> None:
        """Step until vLLM holds no batch and the scheduler has forgotten its finished requests.

        With CUDA, vLLM prepares the next batch before it has the last one's tokens.
        """
        llm_engine = self._llm.llm_engine
        core = llm_engine.engine_core.engine_core
        for _ in range(100):
            if not (core.scheduler.has_requests() or core.batch_queue):
                return
            llm_engine.step()
        raise RuntimeError("vLLM still holds requests after all completions have ended")

    def _wake(self, tag: Literal["weights", "kv_cache"]) -> None:
        if tag in self._asleep:
            self._llm.wake_up(tags=[tag])
            self._asleep.remove(tag)


def _completion(output: Any) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
    truncated = output.finish_reason == "length"
    return Completion(list(output.token_ids), _drawn_logprobs(output.logprobs), truncated)


def _drawn_logprobs(found: Any) -> Any:
    """The logprob of each drawn token from vLLM's `FlatLogprobs`, None for one without."""
    if found is None:
        return None
    places = zip(found.start_indices, found.end_indices, strict=True)
    return [found.logprobs[start] if start < end else None for start, end in places]
