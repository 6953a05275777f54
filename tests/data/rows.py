"""Rows, files, data modules and tokenizers for the tests of the data modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from logra_lightning.data import SourceRows, TokenizedDataModule
from tests.conftest import TINY_POLICY

ROWS = [{"prompt": f"{i} + {i} =", "answer": str(2 * i), "level": {"a": [i]}} for i in range(10)]
# The tiny policy knows digits alone: 7= is what the system says, 8= the user.
CHAT = (
    "{% for m in messages %}{{ {'system': '7=', 'user': '8='}[m['role']] }}"
    "{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '+' if thinking else '-' }}{% endif %}"
)


class Fixed(TokenizedDataModule):
    """Rows of two lists."""

    def __init__(self, train: Any = ROWS, val: Any = (), **options: Any) -> None:
        super().__init__(**({"tokenizer": str(TINY_POLICY), "prompts_per_step": 2} | options))
        self.given = train, val

    def load_rows(self) -> tuple[Any, Any]:
        return self.given


class TwoSources(TokenizedDataModule):
    """Two sources with other columns, trained on by the shares 3 to 1."""

    weights = (3.0, 1.0)

    def load_rows(self) -> tuple[list[SourceRows], list[SourceRows]]:
        sums = SourceRows("sums", ROWS)
        others = SourceRows("others", [{"q": "1", "gold": 1}, {"q": "2", "gold": 2}], "q")
        return [sums, others], []


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ready(data: Any) -> Any:
    data.setup("fit")
    return data


def save_chat_tokenizer(folder: Path) -> str:
    """The tiny policy's, with `CHAT` as its template."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


def word_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Words `one` and `two` are tokens 3 and 4; <s>, token 0, is put before all that is encoded."""
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, "one": 3, "two": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
