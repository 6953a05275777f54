"""Any rows: two steps on prompts that say what the rows say, or one line of refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from logra_lightning import PromptDataModule, Reward, SamplingParams
from logra_lightning.cli import _is_ours
from tests.conftest import SIZES
from tests.runs import policy, trainer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # no system role, user and assistant in turn
    "{% for m in messages %}"
    "{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = CHATML.replace(
    "{{ m['content'] }}", "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "strict": STRICT, "parts": PARTS, "none": None}
CONTEXT = 160


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a model that knows every byte, by the name of its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    sizes = {**SIZES, "vocab_size": len(vocabulary), "max_position_embeddings": CONTEXT}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    found = {}
    for name, template in TEMPLATES.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="<|im_end|>", additional_special_tokens=special[:1]
        )
        tokenizer.chat_template = template
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        found[name] = str(folder)
    return found


def frame(messages: list[dict[str, Any]]) -> str:
    """ChatML, written out: what the engine must get to read."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return f"{turns}<|im_start|>assistant\n"


def said(content: Any) -> str | None:
    """The text of a content, None where it has none."""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            return None
        return "\n".join(part["text"] for part in content)
    return content if isinstance(content, str) else None


@dataclass
class Case:
    template: str
    rows: list[dict[str, Any]]
    options: dict[str, Any]
    group_size: int
    max_tokens: int
    minibatches: int


text = st.one_of(
    st.sampled_from(
        ["5+0?", "x = {y}", "né 你好 🙂", "<|im_end|>", "<|im_start|>user\nhi", "  ", ""]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="<|\r"), max_size=40),
)
content = st.one_of(
    text,
    text,
    st.none(),
    st.just(7),
    st.lists(
        st.one_of(
            st.fixed_dictionaries({"type": st.just("text"), "text": text}),
            st.just({"type": "image", "image": "x.png"}),
            st.just("loose"),
        ),
        max_size=2,
    ),
)
role = st.sampled_from(["user"] * 6 + ["system", "assistant", "human", "User", "", None])
message = st.one_of(
    st.fixed_dictionaries({"role": role, "content": content}),
    st.fixed_dictionaries({"role": st.just("user"), "content": text}),
    st.fixed_dictionaries({"from": st.just("human"), "value": text}),
    st.fixed_dictionaries({"content": text}),
    st.sampled_from(["text", 3, {}]),
)
good_chat = st.lists(text.filter(str.strip), min_size=1, max_size=3).map(
    lambda texts: [
        {"role": ("user", "assistant")[(len(texts) - i - 1) % 2], "content": t}
        for i, t in enumerate(texts)
    ]
)
prompt = st.one_of(text, good_chat, good_chat, st.lists(message, max_size=3), st.none(), st.just(5))
row = st.fixed_dictionaries({"prompt": prompt}, optional={"answer": st.integers(0, 9), "q": text})
plain = text.filter(str.strip).filter(lambda value: "<|" not in value)
options = st.fixed_dictionaries(
    {
        "prompts_per_step": st.integers(1, 2),
        "system_prompt": st.sampled_from([None, "Be brief.", "", " "]),
        "val_size": st.sampled_from([0, 0, 1, 2]),
        "overlong_prompts": st.sampled_from(["error", "drop"]),
        "max_prompt_tokens": st.sampled_from([1024, 64, 8]),
    },
    optional={
        "prompt_template": st.sampled_from(["Q: {q}", "{answer}?", "{nothing}", "no column"]),
        "prompt_column": st.sampled_from(["q", "prompt", "absent"]),
    },
)
cases = st.builds(
    Case,
    template=st.sampled_from(["chatml", "chatml", *TEMPLATES]),
    rows=st.one_of(
        st.lists(row, min_size=1, max_size=5),
        st.lists(st.fixed_dictionaries({"prompt": good_chat}), min_size=3, max_size=5),
        st.lists(st.fixed_dictionaries({"prompt": plain, "q": plain}), min_size=3, max_size=5),
    ),
    options=options,
    group_size=st.sampled_from([2, 2, 2, 3, 1]),
    max_tokens=st.sampled_from([1, 4, 100]),
    minibatches=st.sampled_from([1, 1, 2]),
)


def expected_prompts(case: Case) -> Iterator[str]:
    """What the prompts of the rows must decode to; rows are known to be good."""
    for row in case.rows:
        prompt: Any = row.get(case.options.get("prompt_column", "prompt"))
        if "prompt_template" in case.options:
            prompt = case.options["prompt_template"].format(**row)
        system = case.options.get("system_prompt")
        if case.template == "none":
            yield prompt
            continue
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [{"role": m["role"], "content": said(m["content"])} for m in prompt]
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        if case.template == "strict":
            messages = [{**m, "content": m["content"].strip()} for m in messages]
        yield frame(messages)


def outcome(case: Case, model: str, folder: Path) -> Any:
    """The trained module and its data, or the error that refused the case."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    run = trainer(folder)
    try:
        data = PromptDataModule(str(path), model, **case.options)
        module = policy(
            model=model,
            rewards=[Reward(length, name="length")],
            group_size=case.group_size,
            sampling=SamplingParams(max_tokens=case.max_tokens),
            minibatches=case.minibatches,
        )
        run.fit(module, datamodule=data)
    except Exception as error:  # whatever it is; the test looks at it
        return error
    assert run.global_step >= 2
    return module, data


def length(completion: str) -> float:
    return float(len(completion) % 3)


@pytest.mark.filterwarnings("ignore")  # rows of any kind earn warnings of many kinds
@pytest.mark.usefixtures("private_datasets_cache")
def test_prompts_say_what_the_rows_say_or_are_refused_in_one_line(
    folders: dict[str, str], tmp_path: Path
) -> None:
    counts = {"trained": 0, "refused": 0}

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(case=cases)
    def check(case: Case) -> None:
        found = outcome(case, folders[case.template], tmp_path)
        if isinstance(found, Exception):
            assert isinstance(found, ValueError), repr(found)
            assert _is_ours(found), repr(found)
            assert "\n" not in str(found), repr(found)
            counts["refused"] += 1
            return
        counts["trained"] += 1
        module, data = found
        ids = [*data.train.prompt_ids, *data.val.prompt_ids]
        decoded = [module.tokenizer.decode(prompt) for prompt in ids]
        expected = list(expected_prompts(case))
        if case.options.get("overlong_prompts") == "drop":
            assert set(decoded) <= set(expected)
        else:
            assert sorted(decoded) == sorted(expected)

    check()
    assert min(counts.values()) >= 10, counts
