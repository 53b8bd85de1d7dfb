"""Chats as ids: the loss is on the answers, whatever the template; files fail with a name."""

import json

import pytest

from recipe_ckpt.errors import ConfigError
from recipe_ckpt.sft.data import (
    IGNORED,
    ChatEncoder,
    Collator,
    EncodedDataset,
    build_arithmetic,
    build_fingerprint,
    build_jsonl,
)
from recipe_ckpt.sft.sampler import SampleKey

CHAT = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "d"},
]
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
SHORTENING = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer():
    from recipe_ckpt.sft.model import build_tiny

    shape = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "attention_dropout": 0.0, "dtype": "float32"}
    return build_tiny(**shape).tokenizer


def answers_of(tokenizer, row):
    return tokenizer.decode([token for token in row["labels"] if token != IGNORED])


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(tokenizer, train, val=(), **options):
    columns = {"messages_key": "messages", "prompt_key": None, "response_key": None}
    values = {"max_length": 64, "chat_template": None, **columns, **options}
    return build_jsonl(tokenizer, train_files=[train], val_files=list(val), **values)


@pytest.mark.parametrize(("template", "answers"), [(None, "b</s>d</s>"), (CHATML, "b<|end|>d<|end|>")])
def test_labels_are_every_answer_with_its_end_mark(tokenizer, template, answers):
    encoder = ChatEncoder(tokenizer, 200, template)
    row = encoder.encode(CHAT)
    assert answers_of(tokenizer, row) == answers
    assert tokenizer.decode(row["input_ids"]) == encoder.render(CHAT)


def test_the_end_mark_of_the_plain_template_is_one_token(tokenizer):
    assert ChatEncoder(tokenizer, 200, None).encode(CHAT)["input_ids"][-1] == tokenizer.eos_token_id


def test_the_prompt_is_the_beginning_of_what_was_trained(tokenizer):
    encoder = ChatEncoder(tokenizer, 200, None)
    assert encoder.render(CHAT).startswith(encoder.render(CHAT[:1], is_prompt=True) + "b")


def test_a_template_that_changes_earlier_messages_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data.chat_template: .*as the beginning of the whole chat"):
        ChatEncoder(tokenizer, 200, SHORTENING).encode(CHAT)


def test_what_is_longer_than_max_length_is_cut_off(tokenizer):
    row = ChatEncoder(tokenizer, 10, None).encode(CHAT)
    assert [len(row["input_ids"]), len(row["labels"])] == [10, 10]


def test_micro_batches_are_padded_each_by_itself_and_fillers_have_no_labels():
    rows = EncodedDataset([{"input_ids": [5] * n, "labels": [5] * n} for n in (2, 3, 4)])
    keys = [SampleKey(0, 0), SampleKey(1, 0), SampleKey(2, 0, is_filler=True)]
    first, second = Collator(0, 2)([(key, rows[key]) for key in keys])
    assert first["input_ids"].tolist() == [[5, 5, 0], [5, 5, 5]]
    assert first["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert first["labels"].tolist() == [[IGNORED, 5, IGNORED], [IGNORED, 5, 5]]
    assert (first["ids"], second["ids"]) == ([0, 1], [])
    assert second["labels"].tolist() == [[IGNORED] * 4]


def generate(tokenizer, **changes):
    values = {"train_samples": 30, "val_samples": 5, "max_number": 5, "seed": 0, "max_length": 64, "chat_template": None}
    return build_arithmetic(tokenizer, **{**values, **changes})


def test_arithmetic_is_right_and_its_validation_sums_are_held_out(tokenizer):
    data = generate(tokenizer)
    train = {tokenizer.decode(data.train[SampleKey(n, 0)]["input_ids"]) for n in range(len(data.train))}
    assert len(train) == 30
    assert "user: What is 2+3?\nassistant: 5</s>" in train
    assert all(f"{question}{answer}</s>" not in train for question, answer in data.prompts)


@pytest.mark.case("C709")
@pytest.mark.parametrize(
    "changes", [{"seed": 1}, {"train_samples": 29}, {"max_length": 31}, {"chat_template": CHATML}, {"max_number": 6}]
)
def test_the_fingerprint_changes_with_what_the_model_sees(tokenizer, changes):
    assert generate(tokenizer).fingerprint == generate(tokenizer).fingerprint
    assert generate(tokenizer).fingerprint != generate(tokenizer, **changes).fingerprint


def test_the_fingerprint_depends_on_labels_and_order():
    a, b = {"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": [IGNORED]}
    assert len({build_fingerprint(rows) for rows in ([a], [b], [a, b], [b, a])}) == 4


def test_an_answer_that_never_fits_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"data.max_length: found 10"):
        generate(tokenizer, max_length=10)


def test_messages_and_prompt_response_files_give_the_same_data(tokenizer, tmp_path):
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT[:2]}])
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"q": "a?", "a": "b", "more": 1}])
    one, other = read(tokenizer, chats, [chats]), read(tokenizer, pairs, prompt_key="q", response_key="a")
    assert one.fingerprint == other.fingerprint
    assert one.train[SampleKey(0, 0)] == other.train[SampleKey(0, 0)]
    assert one.prompts == [("user: a?\nassistant: ", "b")]
    assert other.val is None


def test_parquet_is_read_too(tokenizer, tmp_path):
    from datasets import Dataset

    path = str(tmp_path / "pairs.parquet")
    Dataset.from_list([{"q": "a?", "a": "b"}]).to_parquet(path)
    assert len(read(tokenizer, path, prompt_key="q", response_key="a").train) == 1


def test_samples_without_an_answer_are_left_out_loudly(tokenizer, tmp_path, caplog):
    long = [{"role": "user", "content": "x" * 100}, CHAT[1]]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT[:2]}, {"messages": long}, {"messages": CHAT[:1]}])
    assert len(read(tokenizer, path).train) == 1
    assert "data.train_files: 2 of 3 samples have no answer within data.max_length and are left out" in caplog.text


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "data.train_files: .*(at least one sample|files with a JSON)"),
        ("{not json\n", {}, "data.train_files: .*files with a JSON object a line"),
        ('{"text": "x"}\n', {}, r"data.messages_key: found 'messages'; allowed: a column of data.train_files: \['text'\]"),
        ('{"q": "x"}\n', {"prompt_key": "q", "response_key": "a"}, r"data.response_key: found 'a'; .*\['q'\]"),
        ('{"messages": [{"role": "user", "content": "x"}]}\n', {}, "data.train_files: .*at least one sample with an answer"),
        ('{"messages": [{"content": "x"}]}\n', {}, "data.messages_key: .*messages with a role"),
        (
            '{"q": null, "a": "x"}\n',
            {"prompt_key": "q", "response_key": "a"},
            "data.prompt_key: .*None.*messages with a role",
        ),
        ('{"messages": "x"}\n', {}, "data.messages_key: .*messages with a role"),
    ],
)
def test_a_file_without_samples_is_refused_naming_the_key(tokenizer, tmp_path, text, options, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read(tokenizer, str(path), **options)
