"""Old names are found wherever the command line or its files set something."""

from __future__ import annotations

import json
from pathlib import Path

from logra_lightning.renamed import renamed_in


def test_a_file_of_the_model_alone_and_lists_are_looked_through(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"normalizer": None}))
    message = renamed_in(["fit", "--model", str(tmp_path / "model.json")])
    assert "model.json: model.normalizer is model.objective.normalizer now" in message
    callback = {"class_path": "x.Y", "init_args": {"engine": "logra_lightning.rollout.VLLMEngine"}}
    (tmp_path / "list.yaml").write_text(json.dumps({"trainer": {"callbacks": [callback]}}))
    message = renamed_in(["fit", f"--config={tmp_path / 'list.yaml'}"])
    assert "is logra_lightning.engines.VLLMEngine now" in message


def test_a_file_for_all_subcommands_is_looked_through(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(json.dumps({"fit": {"model": {"eval_sampling": {"top_p": 0.9}}}}))
    for words in (["-c", str(path), "fit"], ["fit", "--config", str(path)]):
        message = renamed_in(words)
        assert "fit.model.eval_sampling is fit.model.evaluation.sampling now" in message


def test_what_cannot_be_read_is_left_to_the_parser(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("model: {loss: [")
    for path in ("broken.yaml", "missing.yaml"):
        assert renamed_in(["fit", "--config", str(tmp_path / path)]) == ""
    assert renamed_in(["fit", "--config"]) == ""


def test_names_that_only_begin_alike_are_left_alone() -> None:
    words = [
        "fit",
        "--model.loss_scale=1",
        "--data.init_args.model.loss=2",
        "--model.engine=mine.X",
    ]
    assert renamed_in(words) == ""
    assert renamed_in(["fit", "--trainer.callbacks+=logra_lightning.rollout.Other"]) == ""
