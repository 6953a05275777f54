"""Prompts arrive as the template makes them, with their columns; mistakes are found at setup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from logra_lightning.data import GymSpec, PromptDataModule, ReasoningGymDataModule
from logra_lightning.types import PromptBatch
from tests.conftest import TINY_POLICY

ROWS = [{"prompt": f"{i} + {i} =", "answer": str(2 * i), "level": {"a": [i]}} for i in range(10)]


pytestmark = pytest.mark.usefixtures("private_datasets_cache")


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def module(tmp_path: Path, rows: list[dict[str, Any]] = ROWS, **options: Any) -> PromptDataModule:
    path = write(tmp_path / "rows.jsonl", rows)
    options = {"tokenizer": str(TINY_POLICY), "prompts_per_step": 2} | options
    return PromptDataModule(path, **options)


def ready(data: Any) -> Any:
    data.setup("fit")
    return data


def test_prompts_are_tokenized_and_columns_come_along(tmp_path: Path) -> None:
    data = ready(module(tmp_path, val_size=3))
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    (batch, *_) = data.val_dataloader()
    assert batch.prompt_ids == [tokenizer(row["prompt"])["input_ids"] for row in ROWS[7:]]
    assert batch.columns["answer"] == ["14", "16", "18"]
    assert batch.columns["level"] == [{"a": [7]}, {"a": [8]}, {"a": [9]}]
    assert sorted(data.columns) == ["answer", "level", "prompt"]
    assert len(data.train) == 7
    assert data.longest_prompt == len(batch.prompt_ids[0])


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_other_file_formats(tmp_path: Path, suffix: str) -> None:
    from datasets import Dataset

    path = tmp_path / f"rows.{suffix}"
    dataset = Dataset.from_list(ROWS)
    dataset.to_parquet(path) if suffix == "parquet" else dataset.to_json(path)
    data = ready(PromptDataModule(str(path), str(TINY_POLICY)))
    assert data.train.rows == ROWS


def test_columns_are_renamed(tmp_path: Path) -> None:
    rows = [{"problem": "1 + 1 =", "solution": "2"}]
    data = ready(module(tmp_path, rows, columns={"prompt": "problem", "answer": "solution"}))
    assert data.train.rows == [{"prompt": "1 + 1 =", "answer": "2"}]


CHAT = (
    "{% for m in messages %}{{ m['role'][0] + '=' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '+' if thinking else '-' }}{% endif %}"
)


@pytest.fixture
def chat_tokenizer(tmp_path: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "chat")
    return str(tmp_path / "chat")


def test_chat_template_with_system_prompt_and_kwargs(tmp_path: Path, chat_tokenizer: str) -> None:
    rows = [
        {"prompt": "1 + 1"},
        {"prompt": "2 + 2"},
    ]
    data = ready(
        module(
            tmp_path,
            rows,
            tokenizer=chat_tokenizer,
            system_prompt="3",
            chat_template_kwargs={"thinking": True},
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    # Exactly the template's tokens: no second beginning-of-sequence token.
    expected = tokenizer("s=3u=1 + 1+", add_special_tokens=False)["input_ids"]
    assert data.train.prompt_ids[0] == expected


def test_messages_keep_their_own_system_prompt(tmp_path: Path, chat_tokenizer: str) -> None:
    messages = [{"role": "system", "content": "9"}, {"role": "user", "content": "1"}]
    rows = [{"prompt": messages}]
    data = ready(module(tmp_path, rows, tokenizer=chat_tokenizer, system_prompt="3"))
    tokenizer = AutoTokenizer.from_pretrained(chat_tokenizer)
    expected = tokenizer("s=9u=1-", add_special_tokens=False)["input_ids"]
    assert data.train.prompt_ids == [expected]


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1"}]}]
    with pytest.raises(
        ValueError, match="has no chat template, so training row 0 must be a string"
    ):
        ready(module(tmp_path, rows))


LONG = [*ROWS[:3], {"prompt": "1 + " * 20 + "1 =", "answer": "21", "level": None}, *ROWS[3:]]


def test_overlong_prompts_are_an_error_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"1 of 11 training prompts .* max_prompt_tokens=20; the longest, row 3, has 84",
    ):
        ready(module(tmp_path, LONG, max_prompt_tokens=20))


def test_overlong_prompts_are_dropped_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        data = ready(module(tmp_path, LONG, max_prompt_tokens=20, overlong_prompts="drop"))
    assert "Dropped rows 3." in caplog.text
    assert [row["answer"] for row in data.train.rows] == [row["answer"] for row in ROWS]
    assert data.train.numbers == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("prompt", ["", "  ", None, 3, [], ["text"]])
def test_a_prompt_that_is_none_of_text_or_messages_names_its_row(
    tmp_path: Path, prompt: object
) -> None:
    rows = [{"prompt": prompt}]
    with pytest.raises(ValueError, match="the prompt of training row 0 must be a non-empty string"):
        ready(module(tmp_path, rows))


def test_missing_columns_and_files_list_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no column 'question', only 'prompt', 'answer', 'level'"):
        ready(module(tmp_path, prompt_column="question"))
    with pytest.raises(
        ValueError, match=r"data.init_args.columns names 'gold', but .* has 'prompt', 'answer'"
    ):
        ready(module(tmp_path, columns={"answer": "gold"}))
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1"}\n{"prompt": ')
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"cannot read '.*bad.jsonl' \(split 'train'\): "):
        ready(PromptDataModule(str(tmp_path / "bad.jsonl"), str(TINY_POLICY)))
    with pytest.raises(ValueError, match=r"empty.jsonl' is empty"):
        ready(PromptDataModule(str(tmp_path / "empty.jsonl"), str(TINY_POLICY)))
    with pytest.raises(ValueError, match="there is no file"):
        ready(PromptDataModule(str(tmp_path / "none.jsonl"), str(TINY_POLICY)))


def test_val_size_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="val_size is 10, but .* has 10 rows"):
        ready(module(tmp_path, val_size=10))


SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(**options: Any) -> ReasoningGymDataModule:
    pytest.importorskip("reasoning_gym")
    options = {"tasks": [GymSpec("chain_sum", config=SUMS)], "size": 300, "val_size": 40} | options
    return ReasoningGymDataModule(tokenizer=str(TINY_POLICY), **options)


def test_gym_prompts_of_validation_are_not_trained_on() -> None:
    data = ready(gym())
    train = {row["question"] for row in data.train.rows}
    val = {row["question"] for row in data.val.rows}
    assert train
    assert len(data.val) == 40
    assert not train & val
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, PromptBatch)
    assert set(batch.columns) == {"question", "answer", "metadata"}


def test_gym_tasks_are_mixed_by_weight() -> None:
    tasks = [GymSpec("chain_sum", 3.0, SUMS), GymSpec("spell_backward", 1.0)]
    data = gym(tasks=tasks, size=600, val_size=1)
    train, _ = data.load_rows()
    names = [row["metadata"]["source_dataset"] for row in train]
    # Few one-digit sums exist, and those of the validation set are left out; the mix is not exact.
    assert 0.68 < names.count("chain_sum") / len(names) < 0.82


def test_gym_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="no task 'chain_sums'; it has .*chain_sum"):
        ready(gym(tasks=[GymSpec("chain_sums")]))
    with pytest.raises(ValueError, match=r"data\.init_args\.tasks is empty"):
        gym(tasks=[])
    with pytest.raises(ValueError, match="refuses data.init_args.tasks: .*foo"):
        ready(gym(tasks=[GymSpec("chain_sum", config={"foo": 1})]))
    assert len(ready(gym(val_size=0)).val) == 0
    with pytest.raises(ValueError, match="validation would repeat training prompts"):
        gym(seed=3, val_seed=3)
