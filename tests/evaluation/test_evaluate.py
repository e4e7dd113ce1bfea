"""cetane eval and the server against the harness's own Hugging Face model, on the same weights."""

import json
import math
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.loggers import EvaluationTracker
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tests.server.conftest import running
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import cetane
from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.engine.likelihood import TokenLikelihood
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.evaluation.answers import KeptAnswers
from cetane.evaluation.evaluate import OWN_TASKS, figures, kept_answers
from cetane.evaluation.models import BundleModel, ReferenceModel, TokenModel
from cetane.gates.reference import Reference
from cetane.server.app import serve

TASKS = ["cetane_cloze", "cetane_choice"]
LIMIT = 3


@pytest.fixture(scope="module")
def bundle(chat_bundle: Bundle) -> Bundle:
    return chat_bundle


def likelihoods(results: Any) -> dict[tuple[str, int], list[list[Any]]]:
    """The log likelihood and the greedy flag of every request, by task and sample."""
    return {
        (task, sample["doc_id"]): [list(one[0]) for one in sample["resps"]]
        for task, samples in results["samples"].items()
        for sample in samples
    }


def harness(model: str, arguments: str) -> dict[tuple[str, int], list[list[Any]]]:
    manager = TaskManager(include_path=str(OWN_TASKS), include_defaults=False)
    results = simple_evaluate(
        model=model, model_args=arguments, tasks=TASKS, limit=LIMIT, task_manager=manager,
        bootstrap_iters=0, batch_size=1, device="cpu",
    )  # fmt: skip
    return likelihoods(results)


@pytest.fixture(scope="module")
def truth(bundle: Bundle) -> Any:
    """`lm_eval --model hf` on the checkpoint."""
    return harness("hf", f"pretrained={bundle.manifest.source},dtype=float32")


@pytest.fixture(scope="module")
def in_process(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`cetane eval`, with the harness's files read back."""
    folder = tmp_path_factory.mktemp("results")
    result = cetane.evaluate(
        bundle.path, TASKS, limit=LIMIT, output=folder, against_reference=True, backend="portable"
    )
    samples: dict[str, list[Any]] = {}
    for path in folder.rglob("samples_*.jsonl"):
        task = next(task for task in TASKS if task in path.name)
        samples[task] = [json.loads(line) for line in path.read_text().splitlines()]
    (found,) = folder.rglob("results_*.json")
    assert found.parent == folder / bundle.path.name, "as over HTTP, where the server names it so"
    return result, likelihoods({"samples": samples})


def test_cetane_eval_agrees_with_hf(in_process: Any, truth: Any) -> None:
    result, ours = in_process
    assert ours.keys() == truth.keys() and len(ours) == 2 * LIMIT
    far = []
    for key, values in truth.items():
        for (one, greedy), (other, same) in zip(ours[key], values, strict=True):
            far.append(abs(float(one) - other))
            assert (str(greedy) == "True") == same
    assert sum(far) / len(far) < 0.05  # of continuations of about six tokens
    assert result.nats < 0.01 and result.greedy == 1
    names = {(figure.task, figure.metric) for figure in result.figures}
    assert names == {("cetane_cloze", "acc"), ("cetane_cloze", "perplexity"),
                     ("cetane_choice", "acc"), ("cetane_choice", "acc_norm")}  # fmt: skip
    for figure in result.figures:
        assert figure.difference == pytest.approx(figure.value - figure.reference)
        assert figure.samples == LIMIT
        means = figure.metric != "perplexity"
        assert (figure.error is not None) == (figure.difference_error is not None) == means


def test_the_server_gives_the_same_numbers(bundle: Bundle, in_process: Any) -> None:
    """`lm_eval --model local-completions`, with nothing but the address."""
    with running(serve(bundle.path, backend="portable")) as url:
        served = harness(
            "local-completions",
            f"model={bundle.path.name},base_url={url}/v1/completions,max_length=1024",
        )
    _, ours = in_process
    assert served.keys() == ours.keys()
    for key, values in served.items():
        for (one, greedy), (other, same) in zip(values, ours[key], strict=True):
            assert one == pytest.approx(float(other), abs=1e-9)
            assert greedy == (str(same) == "True")


def test_a_run_that_was_stopped_goes_on(
    bundle: Bundle, in_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("it was asked again")

    monkeypatch.setattr("cetane.evaluation.models.BundleModel.scores", fail)
    again = cetane.evaluate(bundle.path, TASKS, limit=LIMIT, backend="portable")
    first, _ = in_process
    assert [f.value for f in again.figures] == [f.value for f in first.figures]
    assert bundle.gates()["evaluation"]["figures"][0]["task"] in TASKS


def test_answers_that_changed_are_asked_again(tmp_path: Path) -> None:
    """Each file alone: the others' answers stay."""
    answers = KeptAnswers(tmp_path)
    one, two, three = (answers.get("likelihood", [[number], 1])[0] for number in range(3))
    answers.add(one, [-1.5, True])
    answers.save()
    answers.add(two, [-math.inf, False])
    answers.add(three, "text")
    answers.save()
    known = {one: [-1.5, True], two: [-math.inf, False], three: "text"}
    assert KeptAnswers(tmp_path).known == known
    for wrong in (f'{{"{one}": [-1.0, true]}}', f'{{"{one}": 5}}', '{"', "", "\0\0\0\0"):
        (first,) = (
            path for path in tmp_path.glob("*.json") if len(json.loads(path.read_text())) == 1
        )
        first.write_text(wrong)
        again = KeptAnswers(tmp_path)
        assert again.known == {two: known[two], three: known[three]}
        again.add(one, [-1.5, True])
        again.save()
        assert KeptAnswers(tmp_path).known == known


def test_answers_end_with_the_code_and_the_packages_that_gave_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def path(*parts: str) -> Any:
        return kept_answers(["transformers"], *parts).folder

    before = path("a", "portable")
    assert path("a", "portable") == before != path("b", "portable")
    with monkeypatch.context() as patched:
        patched.setattr("cetane.evaluation.evaluate.version", lambda _: "0.1")
        assert path("a", "portable") != before
    monkeypatch.setattr("cetane.tasks.task.code_sha256", lambda *_: "another")
    assert path("a", "portable") != before


def filtered(strict: list[int], flexible: list[int]) -> dict[str, Any]:
    """The harness's results of a task with two filters, such as gsm8k, alone in a group."""
    samples = [
        {"filter": name, "exact_match": right}
        for name, scores in (("strict-match", strict), ("flexible-extract", flexible))
        for right in scores
    ]
    means = {
        "alias": "sums", "exact_match,strict-match": sum(strict) / 4,
        "exact_match_stderr,strict-match": 0.25, "exact_match,flexible-extract": sum(flexible) / 4,
    }  # fmt: skip
    return {
        "results": {"sums": means, "all": {"exact_match,strict-match": sum(strict) / 4}},
        "samples": {"sums": samples}, "group_subtasks": {"all": ["sums"]},
    }  # fmt: skip


def test_every_filter_has_its_own_samples_and_errors() -> None:
    """By hand: of 0, 0, 1, 0 the mean is 1/4 and its standard error 1/4; of 1, 0, 1, 1 too."""
    ours, theirs = filtered([0, 0, 1, 0], [1, 0, 1, 1]), filtered([0, 0, 0, 0], [1, 0, 1, 1])
    strict, flexible, group = figures(ours, theirs)
    assert (strict.metric, flexible.metric) == (
        "exact_match,strict-match", "exact_match,flexible-extract",
    )  # fmt: skip
    assert [row.samples for row in (strict, flexible, group)] == [4, 4, 4]
    assert (strict.value, strict.error) == (0.25, pytest.approx(0.25))
    assert (strict.difference, strict.difference_error) == (0.25, pytest.approx(0.25))
    assert (flexible.value, flexible.error) == (0.75, pytest.approx(0.25))
    assert (flexible.difference, flexible.difference_error) == (0.0, 0.0)
    assert (group.task, group.value) == ("all", 0.25)


def test_results_that_cannot_be_written_are_an_error(
    bundle: Bundle, in_process: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(folder: Path) -> None:
        cetane.evaluate(bundle.path, TASKS, limit=LIMIT, backend="portable", output=folder)

    (tmp_path / "file").write_text("")
    with pytest.raises(CetaneError, match=r"cannot write .*file"):
        to(tmp_path / "file")
    with pytest.raises(CetaneError, match="several files"):
        to(tmp_path / "results.json")
    # what the harness does on a full disk: it logs the error and goes on
    monkeypatch.setattr(EvaluationTracker, "save_results_samples", lambda *_, **__: None)
    with pytest.raises(CetaneError, match="could not write all of its results"):
        to(tmp_path / "folder")


def test_an_adapter_scores_as_the_merged_model(adapted: Any) -> None:
    tokens = [9, 40, 77, 5, 61, 12]
    for name, merged in adapted.merged.items():
        own = BundleModel(adapted.bundle, "portable", KeptAnswers(None), adapter=name)
        with torch.no_grad():
            rows = torch.log_softmax(merged(torch.tensor([tokens])).logits[0], -1)
        wanted = [float(row[token]) for row, token in zip(rows, tokens[1:], strict=False)]
        given = [score.logprob for score in own.scores(tokens, 1)]
        assert given == pytest.approx(wanted, abs=0.02)
    with pytest.raises(CetaneError, match="no adapter 'other'"):
        cetane.evaluate(adapted.bundle.path, TASKS, adapter="other")


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template of ChatML."""
TRIMMED = TURNS.replace("m.content }}", "m.content | trim }}")
"""As Gemma and Llama 3 trim contents."""
LAST_WORD = """
task: last_word
include: {folder}/cetane_cloze.yaml
gen_prefix: "The last word is"
"""


def theirs(bundle: Bundle, template: str) -> Any:
    """What lm_eval's `HFLM.apply_chat_template` reads, with transformers' own tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(bundle.path / "tokenizer")
    tokenizer.chat_template = template
    return SimpleNamespace(tokenizer=tokenizer, chat_template_args={})


@pytest.mark.parametrize("prefix", ["The best answer is", " a blank ", "user", ""])
@pytest.mark.parametrize("template", [TURNS, TRIMMED])
def test_an_answer_that_a_task_begins(bundle: Bundle, template: str, prefix: str) -> None:
    """Its turn stays open, as in `lm_eval --model hf`."""
    own = Written(replace(bundle.tokenizer, chat_template=template), 8, KeptAnswers(None))
    asked = [{"role": "user", "content": "Why? "}, {"role": "assistant", "content": prefix}]
    wanted = HFLM.apply_chat_template(theirs(bundle, template), asked, add_generation_prompt=False)
    assert own.apply_chat_template(asked, add_generation_prompt=False) == wanted
    assert wanted.strip().endswith(prefix.strip())


def test_a_template_that_hides_the_begun_answer(bundle: Bundle) -> None:
    tokenizer = replace(bundle.tokenizer, chat_template="{{ messages[0].content }}")
    with pytest.raises(CetaneError, match="leaves out the message"):
        tokenizer.render_open_chat([{"role": "user", "content": "a"}] * 2)


def test_prompts_of_a_task_with_a_begun_answer(bundle: Bundle, tmp_path: Path) -> None:
    """The harness makes the same requests for both models."""
    (tmp_path / "task.yaml").write_text(LAST_WORD.format(folder=OWN_TASKS))
    manager = TaskManager(include_path=[str(tmp_path)], include_defaults=False)
    own = Written(replace(bundle.tokenizer, chat_template=TURNS), 1024, KeptAnswers(None))
    hf = HFLM(pretrained=bundle.manifest.source, dtype="float32", device="cpu", batch_size=1)
    hf.tokenizer.chat_template = TURNS
    requests = []
    for model in (own, hf):
        results = simple_evaluate(
            model=model, tasks=["last_word"], limit=1, task_manager=manager, bootstrap_iters=0,
            apply_chat_template=True,
        )  # fmt: skip
        ((sample,),) = results["samples"].values()
        requests.append(sample["arguments"])
    assert requests[0] == requests[1]
    assert requests[0][0][0].endswith("assistant\nThe last word is")


REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS
"""As the templates of Gemma 2 and of older Mistrals."""
DESCRIBED = """
task: described
include: {folder}/cetane_cloze.yaml
description: "Complete the passage."
"""


@pytest.mark.parametrize("last", ["user", "assistant"])
def test_a_system_message_that_the_template_refuses(bundle: Bundle, last: str) -> None:
    own = Written(replace(bundle.tokenizer, chat_template=REFUSING), 8, KeptAnswers(None))
    roles = ["system", "user", "assistant"][: 2 if last == "user" else 3]
    asked = [{"role": role, "content": f"I am {role}."} for role in roles]
    wanted = HFLM.apply_chat_template(theirs(bundle, REFUSING), asked, last == "user")
    assert own.apply_chat_template(asked, last == "user") == wanted
    with pytest.raises(CetaneError, match="does not accept"):
        own.apply_chat_template([])


def test_a_warning_counts_prompts_without_system_message(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task.yaml").write_text(DESCRIBED.format(folder=OWN_TASKS))
    refusing = replace(bundle.tokenizer, chat_template=REFUSING)
    monkeypatch.setattr(Bundle, "tokenizer", refusing)
    result = cetane.evaluate(
        bundle.path, ["described"], limit=2, chat=True, include=tmp_path, backend="portable"
    )
    assert len(result.warnings) == 1
    assert result.warnings[0].startswith("2 prompts lack their system message")


class Written(TokenModel):
    """A model that writes a fixed text, and for which every token has a nat."""

    asked: Any

    def scores(self, tokens: Any, start: int) -> Any:
        self.asked = list(tokens), start
        return [TokenLikelihood(token, -1.0) for token in tokens[start:]]

    def write(self, tokens: Any, most: int, sampler: Any, stop: Any) -> Any:
        self.asked = len(tokens), most
        return iter(self.own_tokenizer.encode("one two STOP three")[:most])


def test_generated_answers_end_at_their_stop_text(bundle: Bundle) -> None:
    model = Written(bundle.tokenizer, 256, KeptAnswers(None))
    request = Instance(
        "generate_until", {}, ("p" * 100, {"until": ["STOP"], "max_gen_toks": 99}), 0
    )
    assert model.generate_until([request]) == ["one two "]
    assert model.asked == (len(model.tok_encode("p" * 100)), 99)


def test_a_stop_text_that_is_a_special_token_ends_the_answer(bundle: Bundle) -> None:
    """As in `lm_eval --model hf`. The model's own stop token is another one."""
    own = BundleModel(bundle, "portable", KeptAnswers(None))
    ids = own.tok_encode("Once")
    said = [*own.write(ids, 8, Sampler(), ())]
    known = {token: text for text, token in bundle.tokenizer.backend.get_vocab().items()}
    fresh = [at for at, token in enumerate(said) if token not in (*said[:at], *ids)]
    end = max(at for at in fresh if known[said[at]].isascii())
    stop, before = known[said[end]], said[:end]
    assert before and said[end] not in bundle.tokenizer.eos_ids
    hf = HFLM(pretrained=bundle.manifest.source, dtype="float32", device="cpu", batch_size=1)
    hf.tokenizer.add_special_tokens({"additional_special_tokens": [stop]})
    special = Tokenizer.from_str(bundle.tokenizer.backend.to_str())
    special.add_special_tokens([stop])
    own.own_tokenizer = replace(bundle.tokenizer, backend=special)
    options = {"until": [stop, "never said"], "max_gen_toks": 8}
    request = Instance("generate_until", {}, ("Once", options), 0)
    wanted = [bundle.tokenizer.decode(before)]
    assert hf.generate_until([request], disable_tqdm=True) == wanted
    assert own.generate_until([request]) == wanted
    reference = Reference(open_checkpoint(bundle.manifest.source))
    theirs = ReferenceModel(reference, own.own_tokenizer, 64, KeptAnswers(None))
    assert theirs.generate_until([request]) == wanted


def test_a_prompt_stays_whole_and_its_answer_gets_the_rest(bundle: Bundle) -> None:
    prompt = "Why is the sky blue?"
    count = len(bundle.tokenizer.encode(prompt))
    for room, wanted, most, shortened in ((5, 5, 5, 0), (5, 6, 5, 1), (5, 1024, 5, 1)):
        model = Written(bundle.tokenizer, count + room, KeptAnswers(None))
        request = Instance("generate_until", {}, (prompt, {"max_gen_toks": wanted}), 0)
        model.generate_until([request])
        assert (model.asked, model.shortened) == ((count, most), shortened)


def test_a_prompt_without_room_is_refused_before_the_first_answer(bundle: Bundle) -> None:
    prompt = "Why is the sky blue?"
    count = len(bundle.tokenizer.encode(prompt))
    model = Written(bundle.tokenizer, count, KeptAnswers(None))
    options = {"max_gen_toks": 5}
    short = Instance("generate_until", {}, ("Why?", options), 0, ("skies", 12, 1))
    long = Instance("generate_until", {}, (prompt, options), 0, ("skies", 13, 1))
    refused = rf"skies, sample 13 \(from 0\): a prompt of {count} tokens leaves no room"
    with pytest.raises(CetaneError, match=refused):
        model.generate_until([short, long])
    assert not hasattr(model, "asked")
    requests: Any = [(None, [1], [2]), (None, [1], [2] * (count + 1))]
    with pytest.raises(CetaneError, match=f"continuation of {count + 1} tokens does not fit"):
        model._loglikelihood_tokens(requests)
    assert not hasattr(model, "asked")


def test_repeated_samples_differ_and_come_again(bundle: Bundle) -> None:
    def answers(**options: Any) -> list[str]:
        model = BundleModel(bundle, "portable", KeptAnswers(None))
        given = {"until": [], "max_gen_toks": 8} | options
        return model.generate_until([Instance("generate_until", {}, ("Once", given), 0)] * 4)

    drawn = answers(do_sample=True, temperature=1.0)
    assert len(set(drawn)) > 1 and answers(do_sample=True, temperature=1.0) == drawn
    (greedy,) = set(answers())
    for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0), ("do_sample", False)):
        assert set(answers(temperature=1.0, num_beams=1, **{name: value})) == {greedy}
    with pytest.raises(CetaneError, match="asks for num_beams, repetition_penalty, which"):
        answers(repetition_penalty=1.2, num_beams=4)


def test_every_token_of_a_continuation_is_scored(bundle: Bundle) -> None:
    model = Written(bundle.tokenizer, 8, KeptAnswers(None))
    for context, ids, start in (
        ([], [model.prefix_token_id, 7, 8, 9], 1),
        ([5], [5, 7, 8, 9], 1),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], 6),
        ([0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9], 6),
    ):
        ((total, _),) = model._loglikelihood_tokens([(None, context, [7, 8, 9])])
        assert (total, model.asked) == (-3.0, (ids, start))
    for length, context in ((9, [1]), (10, [1, 2])):
        with pytest.raises(CetaneError, match=f"continuation of {length} tokens does not fit"):
            model._loglikelihood_tokens([(None, context, [7] * length)])


def test_what_is_longer_than_the_context_is_cut_as_in_hf(bundle: Bundle) -> None:
    """At each length near the context's 1,024 tokens, of which one more can be scored."""
    own = BundleModel(bundle, "portable", KeptAnswers(None))
    hf = HFLM(pretrained=bundle.manifest.source, dtype="float32", device="cpu", batch_size=1)
    assert own.max_length == hf.max_length == 1024
    text = "".join(random.Random(0).choices("0123456789", k=2100))
    ids = own.tok_encode(text)
    assert len(ids) == len(text)  # a token for each digit
    pairs = [(None, ids[:-4][-length:], ids[-4:]) for length in (1019, 1020, 1021, 1022, 1900)]
    pairs.append((None, ids[:1], ids[1:1025]))  # as long as the context
    ours, theirs = own._loglikelihood_tokens(pairs), hf._loglikelihood_tokens(pairs, True)
    for (total, greedy), (wanted, same), (_, _, continuation) in zip(
        ours, theirs, pairs, strict=True
    ):
        assert total == pytest.approx(wanted, abs=5e-4 * len(continuation)) and greedy == same
    for length in (1023, 1024, 1025, 2100):
        whole = Instance("loglikelihood_rolling", {}, (text[:length],), 0)
        assert own.loglikelihood_rolling([whole]) == pytest.approx(
            hf.loglikelihood_rolling([whole], True), abs=5e-4 * length
        )
    with pytest.raises(CetaneError, match="context"):
        own.scores(ids[:1026], 1)


def test_the_harness_says_nothing_of_its_own(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Outside a git repository, git complained under the harness's bars."""
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    cetane.evaluate(bundle.path, TASKS[:1], limit=1, progress=lambda what, *_: told.append(what))
    assert capfd.readouterr() == ("", "")
    assert set(told) <= {"log likelihoods"}


def test_wrong_use(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def own_only(include_path: list[str], include_defaults: bool = True) -> TaskManager:
        """Without the index of all tasks of the harness, which takes seconds."""
        return TaskManager(include_path=include_path, include_defaults=False)

    told: list[str] = []
    monkeypatch.setattr("cetane.evaluation.evaluate.TaskManager", own_only)
    with pytest.raises(CetaneError, match="did you mean 'cetane_cloze'"):
        cetane.evaluate(bundle.path, ["cetane_close"], progress=lambda what, *_: told.append(what))
    assert told == ["the harness's index of tasks"]  # which takes a while
    with pytest.raises(CetaneError, match="no task to run"):
        cetane.evaluate(bundle.path, [])
    with pytest.raises(CetaneError, match="gone: no such folder"):
        cetane.evaluate(bundle.path, TASKS, include="gone")


def test_data_that_is_out_of_reach(bundle: Bundle, tmp_path: Path, monkeypatch: Any) -> None:
    """The hub is asked for it. The advice names tasks that need no hub."""
    (tmp_path / "far.yaml").write_text(
        "task: far\ndataset_path: nobody/nothing\noutput_type: multiple_choice\n"
        "test_split: test\ndoc_to_text: '{{text}}'\ndoc_to_target: 0\ndoc_to_choice: [a, b]\n"
    )
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CetaneError, match=r"out of reach: .*nobody/nothing") as refused:
        cetane.evaluate(bundle.path, ["far"], include=tmp_path)
    assert refused.value.hint is not None and ",".join(TASKS) in refused.value.hint


def test_a_missing_reference_is_told_before_the_bundle_answers(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.evaluation.evaluate.run", None)
    with pytest.raises(CetaneError, match="no such file or folder"):
        cetane.evaluate(bundle.path, TASKS, against_reference=True, model="gone")


def test_another_reference_of_the_same_shape_is_told(bundle: Bundle, tmp_path: Path) -> None:
    other = shutil.copytree(bundle.manifest.source, tmp_path / "other")
    os.utime(other / "model.safetensors", (1, 1))
    result = cetane.evaluate(
        bundle.path, TASKS[1:], limit=1, against_reference=True, model=other, backend="portable"
    )
    assert result.warnings == (f"{other} is not the file that {bundle.path} was made from",)
