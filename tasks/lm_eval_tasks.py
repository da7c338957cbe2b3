"""lm-eval's own task objects: built from their definition, asked for requests, and used as scorers.

Importing this imports lm-eval.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, nanmean
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from dllm_bench.errors import UserError
from dllm_bench.hub_access import quiet
from dllm_bench.tasks.lm_eval_names import find

__all__ = ["Definition", "LiveTask", "Scorer", "json_doc"]

_ELSEWHERE = "run it with: dllm-bench lm-eval run --model dllm_bench"
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
# what lm-eval seeds Python's and numpy's global streams with before it builds tasks
_PYTHON_SEED, _NUMPY_SEED = 0, 1234


@dataclass(frozen=True)
class Definition:
    """A task with what changes it; equal definitions give equal tasks where the data is equal.

    Attributes:
        metadata: JSON object for tasks that are made by a function, such as {"max_seq_lengths": [4096]}.
    """

    name: str
    include_path: str | None = None
    metadata: str | None = None

    def config(self) -> dict[str, Any]:
        """lm-eval's configuration, its functions imported. Raises UserError for what has no place here."""
        path = find(self.name, self.include_path)
        try:
            config: dict[str, Any] = deepcopy(load_yaml(path, resolve_func=True))
        except Exception as error:  # a task's own Python files may raise anything while they are imported
            raise UserError(f"lm-eval task '{self.name}' does not load from {path}: {error}") from error
        if "class" in config:
            raise UserError(f"lm-eval task '{self.name}' is a Python class with requests of its own: {_ELSEWHERE}")
        for key in ("tag", "group", "task_list"):
            config.pop(key, None)
        told = config.get("metadata") or {}
        config["metadata"] = (told if isinstance(told, dict) else {"version": told}) | self._metadata()
        return config

    def _metadata(self) -> dict[str, Any]:
        try:
            found = json.loads(self.metadata or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UserError(f'lm_eval option metadata must be a JSON object such as {{"a": 1}}, got {self.metadata!r}')
        return found


class LiveTask:
    """A task with its documents.

    Args:
        data: a folder with SPLIT.jsonl or SPLIT.json, or one such file for the asked split; None: the task's own.
        num_fewshot: None: the task's own number.
    """

    def __init__(self, definition: Definition, data: str | None, num_fewshot: int | None, fewshot_seed: int) -> None:
        self.definition = definition
        config = definition.config()
        _check_config(definition.name, config)
        _set_fewshot(definition.name, config, num_fewshot)
        if data is not None:
            _set_data(definition.name, config, Path(data).expanduser())
        self._config = {key: value for key, value in config.items() if key != "metadata"}
        with _global_seeds():
            self.task = _built(definition.name, config)
            self.docs = self.task.eval_docs
        self.task.set_fewshot_seed(fewshot_seed)
        if not _shares(self.task):
            raise UserError(
                f"lm-eval task '{definition.name}' has no score per answer, only {', '.join(self.task.aggregation())} "
                f"of the whole set: {_ELSEWHERE}"
            )
        self._requests: list[list[Instance]] = []

    @property
    def generates(self) -> bool:
        """Whether a text is asked for; otherwise likelihoods are."""
        return bool(self.task.OUTPUT_TYPE == "generate_until")

    @property
    def asks_greedy(self) -> bool:
        """Whether a metric asks if greedy decoding would give the answer."""
        return bool(self.task.OUTPUT_TYPE == "loglikelihood" or "exact_match" in self.task.aggregation())

    def requests(self, index: int, **prompt: Any) -> list[Instance]:
        """The requests for one document. Few-shot examples are drawn document by document from one stream, so all
        before it are made first: document `index` has the examples that it has in lm-eval on one process.

        `prompt`: system_instruction, apply_chat_template, fewshot_as_multiturn, chat_template; the same in every call.
        """
        while len(self._requests) <= index:
            number = len(self._requests)
            doc = self.docs[number]
            context = self.task.fewshot_context(
                doc, num_fewshot=self.task.config.num_fewshot, gen_prefix=self.task.doc_to_prefix(doc), **prompt
            )
            made = self.task.construct_requests(
                doc=doc,
                ctx=context,
                metadata=(self.definition.name, number, 1),
                apply_chat_template=prompt["apply_chat_template"],
                chat_template=prompt["chat_template"],
            )
            self._requests.append(made if isinstance(made, list) else [made])
        return self._requests[index]

    def references(self, index: int) -> tuple[str, ...]:
        """The accepted answers, as texts."""
        doc = self.docs[index]
        target = self.task.doc_to_target(doc)
        targets = target if isinstance(target, list) else [target]
        choices = self.task.doc_to_choice(doc) if self.task.config.doc_to_choice is not None else None
        return tuple(
            str(choices[one] if choices and isinstance(one, int) and one < len(choices) else one) for one in targets
        )

    def facts(self, index: int) -> dict[str, Any]:
        """What `Scorer` needs to score an answer, as JSON."""
        return {
            "doc_id": index,
            "doc": json_doc(self.docs[index]),
            "include_path": self.definition.include_path,
            "metadata": self.definition.metadata,
            # lm-eval takes these from the first document of the set
            "multiple_target": self.task.multiple_target,
            "multiple_input": self.task.multiple_input,
            "lm_eval_version": lm_eval.__version__,
        }

    def identity(self) -> str:
        """lm-eval's version, the task's version, and a hash of its definition, questions and few-shot examples."""
        digest = hashlib.sha256(_json(self.task.dump_config()).encode())
        shots = self.task.sampler.df if self.task.config.num_fewshot else []
        for docs in (self.docs, shots):
            for doc in docs:
                digest.update(_json(doc).encode())
        return f"lm-eval {lm_eval.__version__}:v{self.task.VERSION}:{digest.hexdigest()[:16]}"


class Scorer:
    """A task without data: scores an answer from the document that was stored with it."""

    def __init__(self, definition: Definition, doc: Mapping[str, Any]) -> None:
        config = definition.config()
        config |= dict.fromkeys(("process_docs", "fewshot_config", "fewshot_split", "dataset_kwargs"))
        config["num_fewshot"] = 0
        self.task = _StoredTask.over(config, doc)
        self.generates = self.task.OUTPUT_TYPE == "generate_until"
        self.shares = _shares(self.task)
        self._aggregations = self.task.aggregation()
        self._multiple = {name: getattr(self.task, name) for name in ("multiple_target", "multiple_input")}

    def values(self, facts: Mapping[str, Any], answers: Sequence[Any]) -> dict[str, Any]:
        """What lm-eval gives one document, by "metric,filter" as it names them.

        Args:
            facts: of `LiveTask.facts`. answers: one per request: the text, or (log-likelihood, greedy).
        """
        doc = dict(facts["doc"])
        for name, own in self._multiple.items():
            setattr(self.task, name, facts.get(name, own))
        instances = [
            Instance(self.task.OUTPUT_TYPE, doc, (), number, ("", 0, 1), resps=[answer])
            for number, answer in enumerate(answers)
        ]
        self.task._instances = instances
        self.task.apply_filters()
        found: dict[str, Any] = {}
        for name in instances[0].filtered_resps:
            results = self.task.process_results(doc, [one.filtered_resps[name] for one in instances])
            found |= {f"{metric},{name}": value for metric, value in results.items()}
        return found

    def is_share(self, key: str) -> bool:
        """Whether the value by this key is a number per answer, and the set's value their mean."""
        return key.partition(",")[0] in self.shares

    def aggregate(self, key: str, values: Sequence[Any]) -> float:
        """lm-eval's value of a set."""
        return float(self._aggregations.get(key.partition(",")[0], mean)(values))


class _StoredTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval has no types
    """A task whose documents are given, instead of being downloaded."""

    @classmethod
    def over(cls, config: dict[str, Any], doc: Mapping[str, Any]) -> _StoredTask:
        """The task of a configuration over one document."""

        class Stored(cls):  # type: ignore[misc, valid-type]
            def download(self, *_: Any, **__: Any) -> None:
                docs = _Docs([dict(doc)])
                self.dataset = {config[split]: docs for split in _SPLITS if config.get(split)}

        return Stored(config=config)


class _Docs(list[dict[str, Any]]):
    """Documents with what lm-eval reads of a data set."""

    @property
    def features(self) -> dict[str, None]:
        return dict.fromkeys(self[0])


def json_doc(doc: Mapping[str, Any]) -> dict[str, Any]:
    """A document as JSON has it; what JSON has no form for becomes text."""
    found: dict[str, Any] = json.loads(_json(doc))
    return found


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _shares(task: Any) -> set[str]:
    return {name for name, way in task.aggregation().items() if way in (mean, nanmean)}


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    """Refuses what `run` cannot do honestly."""
    if config.get("output_type") == "loglikelihood_rolling":
        raise UserError(f"lm-eval task '{name}' asks for the likelihood of whole texts: {_ELSEWHERE}")
    if config.get("unsafe_code"):
        raise UserError(f"lm-eval task '{name}' runs generated code: {_ELSEWHERE} --confirm_run_unsafe_code")
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise UserError(f"lm-eval task '{name}' shows images or sound, which these models do not take")
    if (config.get("repeats") or 1) != 1:
        raise UserError(f"lm-eval task '{name}' asks each question {config['repeats']} times: {_ELSEWHERE}")


def _set_fewshot(name: str, config: dict[str, Any], number: int | None) -> None:
    own = config.get("num_fewshot")
    if number is not None and own == 0 and number:
        raise UserError(f"lm-eval task '{name}' fixes num_fewshot at 0: nearest valid is num_fewshot=0")
    config["num_fewshot"] = (own or 0) if number is None else number


def _set_data(name: str, config: dict[str, Any], data: Path) -> None:
    """Points the task to local files."""
    asked = config.get("test_split") or config.get("validation_split")
    if config.get("custom_dataset") is not None or asked is None:
        raise UserError(f"lm-eval task '{name}' makes its data itself: leave data out")
    shots = (config.get("fewshot_config") or {}).get("split") or config.get("fewshot_split")
    shots = shots or config.get("training_split") or config.get("validation_split")
    needed = {asked} | ({shots} if config["num_fewshot"] and shots else set())
    files: dict[str, str] = {}
    for split in dict.fromkeys(config[key] for key in _SPLITS if config.get(key)):
        places = [data] if data.is_file() and split == asked else [data / f"{split}.jsonl", data / f"{split}.json"]
        place = next((one for one in places if one.is_file()), None)
        if place is not None:
            files[split] = str(place)
        elif split in needed:
            raise UserError(f"lm-eval task '{name}' needs {places[0]}, which does not exist")
    for key in _SPLITS:
        if config.get(key) not in files:
            config[key] = None
    config |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": files}}


def _built(name: str, config: dict[str, Any]) -> Any:
    try:
        with quiet():
            return ConfigurableTask(config=config)
    except Exception as error:  # datasets, the hub and a task's own functions raise many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"lm-eval task '{name}' does not load ({reason}); local data: --task-set data=DIR with its splits, such as "
            "DIR/test.jsonl"
        ) from error


@contextmanager
def _global_seeds() -> Iterator[None]:
    """lm-eval's seeds in the global streams that its tasks may draw from; what they were before comes back."""
    before = random.getstate(), np.random.get_state()
    random.seed(_PYTHON_SEED)
    np.random.seed(_NUMPY_SEED)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
