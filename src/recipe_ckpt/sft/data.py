"""Chats as token ids with the loss on the assistant's answers, and how they become batches."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.utils.data import Dataset

from recipe_ckpt.errors import ConfigError
from recipe_ckpt.sft.sampler import SampleKey

log = logging.getLogger(__name__)

IGNORED = -100
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}"
    "{{ eos_token if message.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

Message = Mapping[str, str]
MicroBatch = dict[str, Any]


@dataclass(frozen=True)
class TrainingData:
    """What the loop trains and evaluates on.

    The data sets take a `SampleKey` and give `{"input_ids", "labels"}`, lists of one length. `fingerprint` changes when
    anything does that the model would see. `prompts` are (question, expected answer) for a look at the end.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None
    fingerprint: str
    pad_id: int = 0
    prompts: Sequence[tuple[str, str]] = ()


class EncodedDataset(Dataset[Any]):
    """Rows `{"input_ids", "labels"}` in a list or an Arrow table."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: SampleKey) -> dict[str, list[int]]:
        row: dict[str, list[int]] = self._rows[key.id]
        return row


class KeyedDataset(Dataset[Any]):
    """Gives (key, item), so that a batch knows its ids and its fillers whatever the data set is."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getitem__(self, key: SampleKey) -> tuple[SampleKey, dict[str, list[int]]]:
        return key, self._dataset[key]


class Collator:
    """Makes a rank's share of a global batch into padded micro-batches. Fillers have no labels."""

    def __init__(self, pad_id: int, micro_batch_size: int | None) -> None:
        self._pad_id = pad_id
        self._micro_batch_size = micro_batch_size

    def __call__(self, samples: Sequence[tuple[SampleKey, dict[str, list[int]]]]) -> list[MicroBatch]:
        size = self._micro_batch_size or len(samples)
        return [self._pad(samples[first : first + size]) for first in range(0, len(samples), size)]

    def _pad(self, samples: Sequence[tuple[SampleKey, dict[str, list[int]]]]) -> MicroBatch:
        shape = (len(samples), max(len(item["input_ids"]) for _, item in samples))
        input_ids = torch.full(shape, self._pad_id)
        labels = torch.full(shape, IGNORED)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        for row, (key, item) in enumerate(samples):
            length = len(item["input_ids"])
            input_ids[row, :length] = torch.as_tensor(item["input_ids"])
            attention_mask[row, :length] = 1
            if not key.is_filler:
                labels[row, :length] = torch.as_tensor(item["labels"])
        labels[:, 0] = IGNORED  # nothing comes before the first token to predict it from
        ids = [key.id for key, _ in samples if not key.is_filler]
        return {"ids": ids, "input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def build_arithmetic(
    tokenizer: Any,
    *,
    train_samples: int,
    val_samples: int,
    max_number: int,
    seed: int,
    max_length: int,
    chat_template: str | None,
) -> TrainingData:
    """Generate sums; those of the validation questions are in no training question."""
    numbers = range(max_number + 1)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(seed).shuffle(pairs)
    held_out, known = pairs[:val_samples], pairs[val_samples:]
    encoder = ChatEncoder(tokenizer, max_length, chat_template)
    train = [encoder.encode(_ask(*known[n % len(known)])) for n in range(train_samples)]
    val = [encoder.encode(_ask(*pair)) for pair in held_out]
    if not all(map(has_answer, train + val)):
        raise ConfigError("data.max_length", max_length, "room for every question and its answer", "Raise it.")
    return _join(encoder, train, val, [_ask(*pair) for pair in held_out])


def build_jsonl(
    tokenizer: Any,
    *,
    train_files: Sequence[str],
    val_files: Sequence[str],
    messages_key: str,
    prompt_key: str | None,
    response_key: str | None,
    max_length: int,
    chat_template: str | None,
) -> TrainingData:
    """Read chats from files. What has no answer left after the cut at `max_length` is left out, with a warning.

    Raises:
        ConfigError: a file can't be read, has no samples, or has not the columns.
    """
    encoder = ChatEncoder(tokenizer, max_length, chat_template)
    columns = Columns(messages_key, prompt_key, response_key)
    train, _ = _read(encoder, columns, "data.train_files", train_files)
    val, chats = _read(encoder, columns, "data.val_files", val_files) if val_files else ([], [])
    return _join(encoder, train, val, chats)


@dataclass(frozen=True)
class Columns:
    """Where a row's chat is."""

    messages_key: str
    prompt_key: str | None
    response_key: str | None

    def check(self, key: str, found: Sequence[str]) -> None:
        wanted = {"data.prompt_key": self.prompt_key, "data.response_key": self.response_key}
        if self.prompt_key is None:
            wanted = {"data.messages_key": self.messages_key}
        for name, column in wanted.items():
            if column not in found:
                raise ConfigError(name, column, f"a column of {key}: {sorted(found)}", f"Write {name}=<column>.")

    def read(self, row: Mapping[str, Any]) -> list[Message]:
        if self.prompt_key is None:
            chat, name = row[self.messages_key], "data.messages_key"
        else:
            answer = row[self.response_key or ""]
            chat, name = [_say("user", row[self.prompt_key]), _say("assistant", answer)], "data.prompt_key"
        if not isinstance(chat, list) or not chat or not all(map(_is_message, chat)):
            raise ConfigError(name, chat, "in every row a chat: messages with a role and a content", "Correct the files.")
        return chat


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


class ChatEncoder:
    """Turns a chat into ids, with labels where the assistant speaks, its end mark included."""

    def __init__(self, tokenizer: Any, max_length: int, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._template = chat_template or getattr(tokenizer, "chat_template", None) or PLAIN_TEMPLATE

    @property
    def pad_id(self) -> int:
        tokenizer = self._tokenizer
        return next((n for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)

    def render(self, chat: Sequence[Message], *, is_prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(chat), chat_template=self._template, tokenize=False, add_generation_prompt=is_prompt
        )
        return text

    def encode(self, chat: Sequence[Message]) -> dict[str, list[int]]:
        input_ids: list[int] = []
        labels: list[int] = []
        for text, is_answer in self._split(chat):
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            input_ids += ids
            labels += ids if is_answer else [IGNORED] * len(ids)
        return {"input_ids": input_ids[: self._max_length], "labels": labels[: self._max_length]}

    def _split(self, chat: Sequence[Message]) -> Iterator[tuple[str, bool]]:
        """Cut the rendered chat where an answer begins and ends: tokens never reach over a cut."""
        whole = self.render(chat)
        done = 0
        for number, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = self.render(chat[:number], is_prompt=True)
            after = self.render(chat[: number + 1])
            if not (whole.startswith(before) and whole.startswith(after) and done <= len(before) <= len(after)):
                raise ConfigError(
                    "data.chat_template",
                    self._template,
                    "a template that renders the first messages of a chat as the beginning of the whole chat",
                    "Otherwise the answers can't be found in the text: give a plainer template.",
                )
            yield whole[done : len(before)], False
            yield whole[len(before) : len(after)], True
            done = len(after)
        yield whole[done:], False


def has_answer(row: Mapping[str, Any]) -> bool:
    return any(label != IGNORED for label in row["labels"][1:])


def _ask(a: int, b: int) -> list[Message]:
    return [_say("user", f"What is {a}+{b}?"), _say("assistant", str(a + b))]


def _read(encoder: ChatEncoder, columns: Columns, key: str, files: Sequence[str]) -> tuple[Any, list[list[Message]]]:
    """Return the encoded rows, and the first few chats as they are."""
    rows = _load_table(key, files)
    columns.check(key, rows.column_names)
    encoded = rows.map(
        lambda row: encoder.encode(columns.read(row)), remove_columns=rows.column_names, desc=f"tokenize {key}"
    )
    kept = encoded.filter(has_answer, desc=f"check {key}")
    if dropped := len(encoded) - len(kept):
        log.warning("%s: %d of %d samples have no answer within data.max_length and are left out", key, dropped, len(rows))
    if not len(kept):
        raise ConfigError(
            key, list(files), "at least one sample with an answer", "Check the files, or raise data.max_length."
        )
    return kept, [columns.read(rows[n]) for n in range(min(8, len(rows)))]


def _load_table(key: str, files: Sequence[str]) -> Any:
    from datasets.exceptions import DatasetsError
    from datasets.load import load_dataset  # only this kind of data needs it

    kinds = {"parquet" if file.endswith(".parquet") else "json" for file in files}
    if len(kinds) > 1:
        raise ConfigError(key, list(files), "files of one kind", "Convert the others.")
    try:
        rows = load_dataset(kinds.pop(), data_files=list(files), split="train")
    except (DatasetsError, ValueError, StopIteration) as error:
        raise ConfigError(
            key, list(files), "files with a JSON object a line, or Parquet", f"Reading failed: {error}"
        ) from error
    if not len(rows):
        raise ConfigError(key, list(files), "at least one sample", "The files are empty.")
    return rows


def _join(encoder: ChatEncoder, train: Any, val: Any, chats: Sequence[Sequence[Message]]) -> TrainingData:
    return TrainingData(
        train=EncodedDataset(train),
        val=EncodedDataset(val) if len(val) else None,
        fingerprint=build_fingerprint(train),
        pad_id=encoder.pad_id,
        prompts=[
            (encoder.render(chat[:-1], is_prompt=True), chat[-1]["content"])
            for chat in chats
            if chat[-1]["role"] == "assistant"
        ],
    )


def build_fingerprint(rows: Any) -> str:
    """Digest what the model sees of all rows: content, template, tokenizer and `max_length` are all in it."""
    digest = xxhash.xxh3_128()
    for row in rows:
        for column in ("input_ids", "labels"):
            digest.update(f"{row[column]}\n".encode())
    return digest.hexdigest()
