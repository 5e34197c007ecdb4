"""The experiment on a pretrained model: its tasks and scores, its runs, and the conversion of SmolLM2."""

import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from examples.demo import task as demo
from experiments.learning.arms import ARMS
from experiments.learning.loop import Settings
from experiments.learning.real import look, pretrained, smollm2
from experiments.learning.real.gym import GYM_TASKS, GymProblems, gym_problems, last_number
from experiments.learning.statistics import GENERATED, SOLVE_RATE
from replay_client.testing import make_group
from replay_trainer.batching import to_batch
from replay_trainer.logprobs import LogprobModel

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}="


class LengthScorer:
    """Scores a text by its length: whether a random model is right is then never rare."""

    def score_answer(self, answer, entry):
        return 1.0 if len(answer) % 2 else 0.01


def tiny_problems(count=64):
    entries = [{"question": f"{i}+1", "answer": str(i + 1), "metadata": {}} for i in range(count)]
    return GymProblems(entries, entries[:3], LengthScorer())


def tiny_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(demo.CHARACTERS) + 3, eos_token_id=1, **sizes)).eval()


def tiny_tokenizer():
    tokenizer = demo.make_tokenizer()
    tokenizer.chat_template = CHAT
    return tokenizer


def tiny_policy():
    return pretrained.PretrainedPolicy(tiny_llama(), tiny_tokenizer(), tiny_problems(), max_tokens=12, seed=0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The final answer is 12.", "12"),
        ("5 + 9 - 7 = 7", "7"),
        ("-4", "-4"),
        ("about 2.5, or 3.75", "3.75"),
        ("no number", None),
        ("", None),
    ],
)
def test_the_last_number_of_an_answer_is_judged(text, number):
    assert last_number(text) == number


def test_what_a_scorer_calls_partly_right_is_wrong():
    problems = tiny_problems()
    entry = problems.train[0]
    assert problems.score(entry, "it is 123") == 1.0
    assert problems.score(entry, "it is 12") == 0.0
    assert problems.score(entry, "none") == 0.0


@pytest.mark.parametrize("name", list(GYM_TASKS))
def test_problems_of_reasoning_gym_are_distinct_and_none_of_the_held_out_is_trained_on(name):
    pytest.importorskip("reasoning_gym", reason="make setup-real")
    first, again, other = (gym_problems(GYM_TASKS[name], seed) for seed in (0, 0, 1))
    assert first.train == again.train != other.train
    assert first.held_out == other.held_out
    train, held_out = ([entry["question"] for entry in part] for part in (first.train, first.held_out))
    assert len(set(train)) == len(train) >= 160
    assert len(set(held_out)) == len(held_out) == 40
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("name", list(GYM_TASKS))
def test_an_answer_of_reasoning_gym_is_right_in_a_sentence_and_another_number_is_wrong(name):
    pytest.importorskip("reasoning_gym", reason="make setup-real")
    problems = gym_problems(GYM_TASKS[name], 0)
    for entry in problems.train[:20]:
        assert problems.score(entry, f"The numbers 1 and 2 give {entry['answer']}.") == 1.0
        assert problems.score(entry, f"It is {int(entry['answer']) + 1}") == 0.0


def test_a_policy_is_sampled_from_its_newest_weights_in_bfloat16():
    policy = tiny_policy()
    policy.sample([0], 8, 0, None)
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    (group,) = policy.sample([5], 8, 1, None)
    assert group.policy_version == 1
    # Without a head all tokens are alike.
    assert np.allclose(group.rollout_logprobs, -np.log(len(demo.CHARACTERS) + 3), atol=1e-3)
    batch = to_batch([group])
    with torch.no_grad():
        logprobs_BT, _ = LogprobModel(policy.model)(batch)
    assert torch.allclose(logprobs_BT[batch.mask_BT], batch.rollout_logprobs_BT[batch.mask_BT], atol=1e-2)


def test_a_model_that_learned_the_form_says_a_number_alone_and_the_next_run_starts_with_its_weights(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(pretrained, "FORM_RATE", 1e-2)
    policy, again = tiny_policy(), tiny_policy()
    for each in (policy, again):
        pretrained.learn_form(each, tmp_path / "form.pt")
    policy.load()
    (group,) = policy.generate([0], 64, 1)
    texts = [tiny_tokenizer().decode(ids, skip_special_tokens=True) for ids in group.completions()]
    assert np.mean([text == last_number(text) for text in texts]) > 0.9
    assert torch.equal(policy.model.lm_head.weight, again.model.lm_head.weight)


def test_a_pretrained_model_is_not_sampled_from_an_older_version():
    with pytest.raises(ValueError, match="arm without lag"):
        tiny_policy().sample([0], 8, 0, {})


def test_an_evaluation_draws_the_same_each_time():
    policy = tiny_policy()
    assert policy.evaluate() == policy.evaluate()


def test_sampled_variety_counts_right_texts_once():
    groups = [
        make_group(completions=[[5], [5], [6], [7]], rewards=[1.0, 1.0, 1.0, 0.0]),
        make_group(completions=[[5], [6]], rewards=[0.0, 0.0]),
    ]
    variety = pretrained.sampled_variety(groups)
    assert variety.pass_at_8 == 0.5
    assert variety.distinct_at_8 == 1.0
    share = np.array([2 / 3, 1 / 3])
    assert variety.answer_entropy == pytest.approx(-(share * np.log(share)).sum() / 2)


@pytest.mark.parametrize("name", ["quarter", "small50-opsm", "small50-right"])
def test_a_run_notes_each_step_and_gives_points_before_the_tokens_of_their_answers(name, monkeypatch, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(pretrained, "smollm2", lambda folder: folder / "model")
    monkeypatch.setattr(pretrained, "gym_problems", lambda task, seed: tiny_problems())
    calls = []
    settings = Settings("chain_sum", "pretrained", 0, 1e-4, 3000)
    done = pretrained.run(ARMS[name], settings, tmp_path, lambda: calls.append(1))
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    curve = np.array(done["curve"])
    assert len(steps) == len(calls) == curve[-1][2]
    assert steps[-1]["generated"] == curve[-1][GENERATED] >= 3000
    # Four steps of 32 answers are a point. Before them is the start, and after them the end.
    assert len(curve) == 2 + len(steps) // 4
    assert curve[1][GENERATED] == round(np.mean([0, *(step["generated"] for step in steps[:3])]))
    assert curve[1][SOLVE_RATE] == pytest.approx(np.mean([step["reward"] for step in steps[:4]]))
    assert ("drift_wrong" in done["means"]) == (name == "small50-opsm")
    assert ("drift_right" in done["means"]) == (name != "quarter")


def step(number, generated, reward, *, arm="quarter", seed=0):
    """A line of steps.jsonl, of a budget of 300 tokens."""
    run = {"arm": arm, "task": "gcd", "regime": "pretrained", "seed": seed, "learning_rate": 1e-5, "budget": 300}
    return run | {"step": number, "generated": generated, "reward": reward}


def test_the_look_into_runs_averages_steps_of_a_part_of_the_budget():
    steps = [step(1, 80, 0.1), step(2, 90, 0.3), step(3, 310, 0.5)]
    rows = [line.split(" | ") for line in look.look(steps, 3)[2:]]
    assert [row[2:6] for row in rows] == [["1 of 3", "1", "2", "0.2"], ["3 of 3", "1", "1", "0.5"]]


def test_the_look_into_runs_leaves_out_a_run_that_was_cut_off_and_those_on_tuning_seeds():
    steps = [step(1, 80, 0.9), step(2, 90, 0.9), step(1, 301, 0.2), step(1, 80, 0.4, arm="plain")]
    steps += [step(1, 301, 0.7, seed=100)]
    rows = [line.split(" | ") for line in look.look(steps, 3)[2:]]
    assert [row[1:6] for row in rows] == [["quarter of the batch", "3 of 3", "1", "1", "0.2"]]


def test_runs_are_added_to_the_published_ones_and_take_the_place_of_the_same_runs(tmp_path, monkeypatch):
    published, local = tmp_path / "published.json", tmp_path / "steps.jsonl"
    published.write_text(json.dumps([step(1, 301, 0.2), step(1, 301, 0.4, arm="plain")]))
    local.write_text("\n".join(json.dumps(each) for each in (step(1, 301, 0.8), step(1, 301, 0.6, seed=1))))
    paths = [str(published), str(local), "--json", str(published)]
    monkeypatch.setattr(sys, "argv", ["look", *paths])
    look.main()
    found = {(each["arm"], each["seed"]): each["reward"] for each in json.loads(published.read_text())}
    assert found == {("quarter", 0): 0.8, ("quarter", 1): 0.6, ("plain", 0): 0.4}


def test_without_the_package_an_error_says_what_to_run(monkeypatch):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match="make setup-real"):
        smollm2.package_file()


@pytest.mark.long
def test_the_converted_model_has_a_head_of_its_own_and_answers_as_its_tokens_are_scored(tmp_path):
    pytest.importorskip("gguf", reason="make setup-real")
    try:
        smollm2.package_file()
    except RuntimeError:
        pytest.skip("make setup-real")
    folder = smollm2.smollm2(tmp_path)
    assert smollm2.smollm2(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert embeddings is not head
    assert torch.equal(embeddings, head)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    answer = model.generate(**ids, do_sample=False, max_new_tokens=12)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
