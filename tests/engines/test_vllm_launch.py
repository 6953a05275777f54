"""What VLLMEngine sets itself cannot be set by users; test_vllm_engine launches vLLM."""

from __future__ import annotations

import pytest

from logra_lightning.engines.vllm_launch import check_engine_args


@pytest.mark.parametrize(
    ("engine_args", "named"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"tokenizer": "x", "seed": 1, "max_num_seqs": 4}, "seed, tokenizer"),
        ({"load_format": "auto"}, "load_format"),
        ({"worker_extension_cls": "x"}, "worker_extension_cls"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
    ids=str,
)
def test_what_it_sets_itself_is_refused(engine_args: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"engine_args sets {named}, which VLLMEngine sets"):
        check_engine_args(engine_args)


def test_everything_else_is_left_to_vllm() -> None:
    check_engine_args({"max_num_seqs": 4, "enable_chunked_prefill": False})
