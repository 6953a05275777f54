"""MathReward gives the values of its table, and no answer can hang it or cost another its score."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator

import pytest

from logra_lightning.rewards import MathReward, Reward, Scores, score
from logra_lightning.types import PromptBatch

pytest.importorskip("math_verify")

BOMBS = [
    r"\boxed{9^{9^{9}}}",
    r"\boxed{2003^{2002^{2001}}}",
    r"\boxed{(10^{9})!}",
    r"\boxed{\binom{10^8}{5\cdot 10^7}}",
]


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    reward = MathReward(timeout_s=1.0, workers=2)
    reward([r"\boxed{x}"], ["y"])  # starts the processes
    yield reward
    reward.close()


TABLE = [
    pytest.param(gold, completion, value, id=name)
    for name, gold, completion, value in [
        ("gold without dollars", r"\dfrac{9}{7}", r"\boxed{\frac{9}{7}}", 1),
        ("gold with dollars", r"$\sqrt{8}$", r"\boxed{2\sqrt{2}}", 1),
        ("one of two", "1331 and 1728", r"\boxed{1728}", 0),
        ("both, joined boxes", "1331 and 1728", r"$\boxed{1728}$ and $\boxed{1331}$", 1),
        ("both, one box", "1331 and 1728", r"\boxed{1728, 1331}", 1),
        ("both, no spaces", "125, 250", r"\boxed{250,125}", 1),
        ("both and one more", "1331 and 1728", r"\boxed{1331, 1728, 5}", 0),
        ("two where one is right", "5", r"\boxed{5, 6}", 0),
        ("incomplete box after", "42", r"\boxed{42} and thus \boxed{", 1),
        ("last box right", "42", r"\boxed{41}, no. \boxed{42}", 1),
        ("last box wrong", "42", r"\boxed{42}, no. \boxed{41}", 0),
        ("hashes in both", "6 * 7 = 42\n#### 42", "7 * 6 = 42\n#### 42", 1),
        ("hashes in the answer", "42", "#### 42", 1),
        ("hashes in the gold", "6 * 7 = 42\n#### 42", r"\boxed{42}", 1),
        ("hashes, wrong", "6 * 7 = 42\n#### 42", "6 * 7 = 42\n#### 41", 0),
        ("box in the gold", r"So it is \boxed{x + 1}.", r"\boxed{1 + x}", 1),
        ("thousands", "1234", r"\boxed{1,234}", 1),
        ("thousands in the gold", "1,234", "1234", 1),
        ("Unicode minus", "-3", "\u22123", 1),
        ("Unicode minus, wrong", "3", "\u22123", 0),
        ("currency", "70000", r"\boxed{\$70,000}", 1),
        ("currency, unmarked", "70000", "They paid $70,000.", 1),
        ("units", "5", r"\boxed{5\text{ apples}}", 1),
        ("units in words", "5", "#### 5 apples", 1),
        ("units in the gold", r"5\text{ apples}", "5", 1),
        ("300 characters after a box", "42", r"\boxed{42}" + " And so on." * 40, 1),
        ("300 characters after hashes", "42", "#### 42\n" + "And so on. " * 40, 1),
        ("300 characters after words", "42", "The answer is 42." + " And so on." * 40, 1),
        ("short words", "1/2", r"It is $\frac12$.", 1),
        ("short words, no dollars", "5", "It is 5.", 1),
        ("mixed number", "3/2", r"\boxed{1\frac{1}{2}}", 1),
        ("numbers side by side", "42", r"\boxed{40 2}", 0),
        ("six decimals", "1/3", r"\boxed{0.333333}", 1),
        ("two decimals", "1/3", r"\boxed{0.33}", 0),
        ("per cent", "50", r"\boxed{50\%}", 1),
        ("words", "Tuesday", r"\boxed{\text{tuesday}}", 1),
        ("anagram", "listen", r"\boxed{silent}", 0),
        ("words alone", r"\text{even}", "even", 1),
        ("words for a number", "5", "none", 0),
        ("bare expression", "(x+1)^2", "x^2 + 2x + 1", 1),
        ("bare expression, wrong", "(x+1)^2", "x^2 + 2x + 2", 0),
        ("choice", "A", r"\boxed{\text{(A)}}", 1),
        ("other choice", "A", r"\boxed{B}", 0),
        ("interval", "[1, 2)", r"\boxed{[1,2)}", 1),
        ("gold is a number", 42, "42", 1),
        ("gold is a float", 0.5, r"\frac12", 1),
        ("empty box", "5", r"\boxed{}", 0),
        ("empty", "5", "", 0),
        ("another kind of box", "5", r"\boxed{4} no, \fbox{5}", 1),
        ("tags", "Tuesday", "<answer>Tuesday</answer>", 1),
        ("a sentence after a box", "6", r"\boxed{5}. No, the answer is 6.", 1),
        ("a sentence after a box, wrong", "5", r"\boxed{5}. No, the answer is 6.", 0),
        ("a choice in a sentence", "B", "The answer is (B).", 1),
        ("per cent in a sentence", "50", "The answer is 50%.", 1),
        ("a fraction in a sentence", "1/2", "The answer is 3/6, as I said.", 1),
        ("two in a sentence", "5", "The answer is 5 or 6.", 0),
        ("thinking", "5", r"<think>\boxed{4}</think>It is 5.", 1),
        ("thinking alone", "5", r"<think>\boxed{5}</think>I do not know.", 0),
        ("thinking without an end", "5", r"<think>so it is \boxed{5}", 0),
        ("nothing to find", "5", "I do not know, really.", 0),
    ]
]


@pytest.mark.parametrize(("gold", "completion", "value"), TABLE)
def test_the_table(reward: MathReward, gold: object, completion: str, value: float) -> None:
    assert reward([completion], [gold]) == [value]


def batch(
    reward: MathReward, completions: list[str], golds: list[str], **options: object
) -> Scores:
    prompts = PromptBatch([[1]] * len(golds), {"answer": golds}, rows=list(range(len(golds))))
    term = Reward(reward, **options)  # type: ignore[arg-type]
    return score([term], prompts, completions, [[1]] * len(completions))


@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "other thread"])
def test_bombs_time_out_are_counted_and_leave_the_others_their_scores(
    reward: MathReward, in_thread: bool
) -> None:
    completions = [*BOMBS, r"\boxed{\frac{18}{2}}", r"\boxed{8}", r"\boxed{3^2}", "9"]
    found: list[Scores] = []

    def run() -> None:
        found.append(batch(reward, completions, ["9"] * 8))

    started = time.monotonic()
    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert time.monotonic() - started < 10
    assert found[0].total.tolist() == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert found[0].metrics == {"rewards/math/timeouts": 4.0, "rewards/math/worker_errors": 0.0}


def test_slow_answers_are_tried_again_only_while_the_batch_lasts() -> None:
    reward = MathReward(timeout_s=30.0, batch_timeout_s=0.5, workers=2)
    started = time.monotonic()
    assert reward([*BOMBS, r"\boxed{3^2}"] * 3, ["9"] * 15) == [0, 0, 0, 0, 1] * 3
    # Four bombs of a second, two at a time; half a second more; and the start.
    assert time.monotonic() - started < 20
    reward.close()


def test_the_processes_do_not_import_torch_and_are_ended(reward: MathReward) -> None:
    reward(["x + 1"], ["y"])
    me = str(os.getpid())
    forkers = [pid for pid, parent, _ in processes() if parent == me]
    workers = [pid for pid, parent, _ in processes() if parent in forkers]
    assert workers
    for pid, _, maps in processes():
        if pid in forkers + workers:
            assert "libtorch" not in maps
    reward.close()
    assert not {pid for pid, _, _ in processes()} & {*forkers, *workers}
    assert reward([r"\boxed{3^2}"], ["9"]) == [1.0]


def processes() -> list[tuple[str, str, str]]:
    """Process, parent and mapped files of the living children that run a pool's script."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as cmdline, open(f"/proc/{name}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
                if "pool_worker.py" in cmdline.read() and fields[0] != "Z":
                    with open(f"/proc/{name}/maps") as maps:
                        found.append((name, fields[1], maps.read()))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


UNUSABLE = ["", "?", r"\frac{9}{", None, True, float("nan"), [5], "It is 5 or 6, but who can tell?"]


def test_golds_that_mean_nothing_are_named(reward: MathReward) -> None:
    golds = ["42", *UNUSABLE, r"\frac{9}{7}", "#### 5", "Tuesday", "x < 3", 7]
    reasons = reward.check_rows(golds)
    unusable = range(1, 1 + len(UNUSABLE))
    assert [i for i, reason in enumerate(reasons) if reason] == list(unusable)
    assert reasons[2] is not None
    assert "the gold answer '?' cannot be parsed" in reasons[2]


def test_it_does_not_apply_where_a_whole_source_has_no_golds(reward: MathReward) -> None:
    assert reward(["1", r"\boxed{x}"], [None, "x"]) == [None, 1.0]
    golds, sources = ["1", None, None, "?"], ["a", "a", "b", "b"]
    missing = [reason is not None for reason in reward.check_rows(golds, source=sources)]
    assert missing == [False, True, True, True]
    missing = [reason is not None for reason in reward.check_rows(golds[:3], source=sources[:3])]
    assert missing == [False, True, False]


def test_a_gold_that_means_nothing_stops_the_run_or_costs_its_own_completions_only(
    reward: MathReward,
) -> None:
    texts, golds = ["1", "2", r"\boxed{x}"], ["1", "?", "x"]
    with pytest.raises(RuntimeError, match="row 1, .* the gold answer '\\?' cannot be parsed"):
        batch(reward, texts, golds)
    with pytest.warns(UserWarning, match="row 1, .* the gold answer '\\?' cannot be parsed"):
        scores = batch(reward, texts, golds, on_error="zero")
    assert scores.total.tolist() == [1.0, 0.0, 1.0]
    assert scores.metrics["rewards/math/errors"] == 1.0


def test_thousands_of_rows_are_checked_quickly(reward: MathReward) -> None:
    golds = [str(i) for i in range(10000)] + [rf"\sqrt{{{i % 50}}}" for i in range(10000)]
    started = time.process_time()
    assert reward.check_rows(golds) == [None] * 20000
    assert time.process_time() - started < 5


def test_equal_answers_are_spelled_alike_for_a_vote(reward: MathReward) -> None:
    same = [
        ["1/2", r"\frac{1}{2}", "0.5", r"\boxed{\frac{2}{4}}", r"It is $\frac12$.", "#### .50"],
        [r"\sqrt{8}", r"\boxed{2\sqrt{2}}"],
        ["x = 5", "5", "#### 5 apples"],
        ["1 + x", r"\boxed{x+1}"],
        ["Even", r"\boxed{\text{even}}"],
        [r"\boxed{1, 2}", r"$\boxed{2}$ and $\boxed{1}$"],
    ]
    found = [reward.answers(texts) for texts in same]
    assert all(len(set(answers)) == 1 for answers in found)
    assert len({answers[0] for answers in found}) == len(same)
    assert found[0][0] == "1/2"
    assert reward.answers(["", "I do not know, really."]) == [None, None]


def test_bombs_keep_their_spelling_in_a_vote(reward: MathReward) -> None:
    started = time.monotonic()
    assert reward.answers([BOMBS[0], BOMBS[0], "7"]) == ["9^{9^{9}}", "9^{9^{9}}", "7"]
    assert time.monotonic() - started < 10


def test_it_can_be_pickled_and_has_limits_of_its_own(reward: MathReward) -> None:
    other = pickle.loads(pickle.dumps(reward))
    assert other(["4"], ["4"]) == [1.0]
    with pytest.raises(ValueError, match="'math' has time limits of its own"):
        Reward(reward, timeout_s=3.0)
    with pytest.raises(ValueError, match="timeout_s and batch_timeout_s above 0, got 0 and"):
        MathReward(timeout_s=0)


def test_a_missing_math_verify_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'logra-lightning\[tasks\]'"):
        MathReward()
