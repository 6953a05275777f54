"""Two groups of two processes with an engine each; run by torchrun, in four processes.

The second group has no prompts in the first call, and prompts in the second.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed

from logra_lightning import TorchEngine
from logra_lightning.types import SamplingParams
from tests.tiny_vllm import make_engine, make_policy

GREEDY = SamplingParams(max_tokens=5, temperature=0.0)


def main() -> None:
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=120))
    process, policy, plain = torch.distributed.get_rank(), make_policy(), TorchEngine()
    plain.start(policy, [2])
    engine = make_engine(tensor_parallel_size=2)
    engine.start(policy, [2])
    prompts = [[5, 6, 7], [8, 9]]
    for asked in (prompts if process < 2 else [], prompts):
        expected = plain.generate(asked, GREEDY, num_completions=1, seed=0)
        found = engine.generate(asked, GREEDY, num_completions=1, seed=process)
        assert [[c.token_ids for c in group] for group in found] == [
            [c.token_ids for c in group] for group in expected
        ]
    engine.close()
    print(f"process {process} is done", flush=True)


if __name__ == "__main__":
    main()
