"""Real forms of data sets, token by token: what apply_chat_template gives for messages cleaned by hand here."""

import json

import pytest

from replay_generator.prompts.prompt import load_prompts
from replay_generator.rewards.functions import load_reward
from tests.kit.models import make_chat_tokenizer, shipped_template

datasets = pytest.importorskip("datasets")

QWEN3 = shipped_template("qwen3")


def rendered(messages, **arguments):
    """By hand: no function of this project has touched these."""
    tokenizer = make_chat_tokenizer(QWEN3)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments)


def prompts_of(source, **options):
    loaded = load_prompts(str(source), **options)
    return [loaded[index] for index in range(len(loaded))]


def ids_of(prompt, **template):
    return prompt.tokenize(make_chat_tokenizer(QWEN3), **template)


# ------------------------------------------------------------------------------------------ verl

QUESTIONS = ["Natalia sold 48 clips.\nHow many?", "Weng earns $12 an hour: how much?"]
ENDING = ' Let\'s think step by step and output the final answer after "####".'
SOLUTIONS = ["She sold 48/2 = <<48/2=24>>24.\n#### 72", "He earned 0.2 x 50.\n#### 1,010"]


def verl_row(index):
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": QUESTIONS[index] + ENDING}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": SOLUTIONS[index].partition("#### ")[2].replace(",", "")},
        "extra_info": {"split": "train", "index": index, "answer": SOLUTIONS[index], "question": QUESTIONS[index]},
    }


@pytest.fixture
def verl(tmp_path):
    """What verl's examples/data_preprocess/gsm8k.py leaves in its folder."""
    rows = datasets.Dataset.from_list([verl_row(0), verl_row(1)])
    rows.to_parquet(tmp_path / "train.parquet")
    rows.select([1]).to_parquet(tmp_path / "test.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["", "train.parquet"])
def test_gsm8k_of_verl(verl, name):
    prompts = prompts_of(verl / name)
    assert [ids_of(each) for each in prompts] == [
        rendered([{"role": "user", "content": text + ENDING}]) for text in QUESTIONS
    ]
    (held_out,) = prompts_of(verl, split="test")
    assert held_out.prompt_id == prompts[1].prompt_id


def test_questions_and_answers_inside_a_row_of_verl(verl):
    first, _ = prompts_of(verl, prompt_field="extra_info.question")
    assert first.content == QUESTIONS[0]
    assert ids_of(first.as_chat()) == rendered([{"role": "user", "content": QUESTIONS[0]}])
    exact = load_reward("exact_match:reward_model.ground_truth").function
    assert exact(first.row, " 72\n") == 1.0
    assert exact(first.row, "\\boxed{72}") == 0.0


# ------------------------------------------------------------------------------------------ TRL

SYSTEM = {"role": "system", "content": "Be brief."}
TRL_ROWS = [
    {
        "prompt": [SYSTEM, {"role": "user", "content": "1+1?"}],
        "solution": "$2$",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    {
        "prompt": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "It is", "name": "calculator"},
        ],
        "solution": "$4$",
        "chat_template_kwargs": None,
    },
]


@pytest.mark.parametrize("saved", ["save_to_disk", "splits", "parquet", "json"])
def test_a_folder_of_trl(tmp_path, saved):
    rows = datasets.Dataset.from_list(TRL_ROWS)
    if saved == "save_to_disk":
        rows.save_to_disk(tmp_path)
    elif saved == "splits":
        datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path)
    elif saved == "parquet":
        (tmp_path / "data").mkdir()
        rows.to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    else:
        rows.to_json(tmp_path / "train.jsonl")
    first, second = prompts_of(tmp_path)
    assert ids_of(first) == rendered([SYSTEM, {"role": "user", "content": "1+1?"}], enable_thinking=False)
    words = make_chat_tokenizer(QWEN3).encode("It is", add_special_tokens=False)
    assert ids_of(second) == [*rendered([{"role": "user", "content": "2+2?"}]), *words]


# ------------------------------------------------------------------------------------------ DAPO

ASKS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $a+b$?\n\nRemember to put your "
    'answer on its own line after "Answer:".'
)
DAPO_ROW = {
    "data_source": "math_dapo",
    "prompt": [{"content": ASKS, "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}


def test_math_of_dapo(tmp_path):
    path = tmp_path / "dapo-math-17k.parquet"
    datasets.Dataset.from_list([DAPO_ROW, DAPO_ROW]).to_parquet(path)
    first, second = prompts_of(path)
    assert ids_of(first) == rendered([{"role": "user", "content": ASKS}])
    assert first.prompt_id == second.prompt_id  # each question is in that file many times
    assert load_reward("exact_match:reward_model.ground_truth").function(first.row, "34") == 1.0


# ------------------------------------------------------------------------------------------ tools


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


def call(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


TOOL_ROWS = [
    {
        "messages": [
            {"role": "user", "content": "Weather in Rome?"},
            call("weather", {"city": "Rome"}),
            {"role": "tool", "name": "weather", "content": "24"},
        ],
        "tools": [tool("weather", city={"type": "string", "enum": ["Rome", "Oslo"]})],
    },
    {
        "messages": [
            {"role": "user", "content": "2+3?"},
            call("add", {"a": 2, "b": 3}),
            {"role": "tool", "name": "add", "content": "5"},
        ],
        "tools": [tool("add", a={"type": "integer"}, b={"type": "integer"}), tool("now")],
    },
]


def with_json(rows):
    """Arguments and tools as JSON, as most data sets have them, for Arrow has no type for either."""
    told = json.loads(json.dumps(rows))
    for row in told:
        row["tools"] = json.dumps(row["tools"])
        for message in row["messages"]:
            for each in message.get("tool_calls", ()):
                each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    return told


def as_parquet(rows, folder):
    datasets.Dataset.from_list(rows).to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def as_folder(rows, folder):
    datasets.Dataset.from_list(rows).save_to_disk(folder / "a")
    return folder / "a"


def as_lines(rows, folder):
    path = folder / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("store", [as_parquet, as_folder, as_lines])
@pytest.mark.parametrize("told", [list, with_json], ids=["objects", "JSON"])
def test_conversations_with_tools(tmp_path, store, told):
    prompts = prompts_of(store(told(TOOL_ROWS), tmp_path), prompt_field="messages")
    assert [ids_of(each) for each in prompts] == [rendered(row["messages"], tools=row["tools"]) for row in TOOL_ROWS]
