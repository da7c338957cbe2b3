"""lm-eval as a source of tasks: its prompts, few-shot examples, filters and metrics, under any method.

A subset is the name of an lm-eval task. Prompts get the model's chat template where it has one, with few-shot examples
as turns; `--chat-template plain` gives the bare text of lm-eval's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dllm_bench.errors import UserError
from dllm_bench.lm_eval_requests import answer_pair, budget_of, chat_text, lm_eval_folder, stops_of
from dllm_bench.models.text import TextCodec
from dllm_bench.options import Options, option
from dllm_bench.running.task import Answer, Choices, Codec, Sample, Task
from dllm_bench.tasks.lm_eval_names import find

if TYPE_CHECKING:
    from dllm_bench.tasks.lm_eval_tasks import LiveTask, Scorer

__all__ = ["LmEval", "LmEvalOptions"]


@dataclass(frozen=True)
class LmEvalOptions(Options):
    """Options of lm_eval."""

    include_path: str | None = option(None, "folder with task files of your own, as lm-eval's --include_path")
    data: str | None = option(
        None, "local data instead of the task's own: a folder with SPLIT.jsonl, or the file of the split that is asked"
    )
    num_fewshot: int | None = option(None, "few-shot examples; the task's own number if not given", low=0)
    fewshot_seed: int = option(1234, "seed of the few-shot examples (lm-eval's default)", low=0)
    fewshot_as_multiturn: bool = option(True, "with a chat template: examples as turns, not in one user turn")
    system_instruction: str | None = option(None, "system instruction in front of the task's description")
    metadata: str | None = option(None, "JSON object for tasks that want one, as lm-eval's --metadata")
    mc_num: int = option(128, "likelihood tasks: noisy copies of each choice (Monte-Carlo samples)", low=1)
    mc_batch: int = option(32, "likelihood tasks: copies computed together", low=1)


class LmEval(Task):
    """Any YAML-defined lm-eval task with a score per answer: `generate_until`, `multiple_choice`, `loglikelihood`.

    Meta: doc_id, doc (the document, as JSON), include_path, metadata, multiple_target, multiple_input,
    lm_eval_version: what lm-eval's filters and metrics need to score the answer again.
    """

    name: ClassVar[str] = "lm_eval"
    version: ClassVar[int] = 1
    summary: ClassVar[str] = "any task of lm-eval by name (lm_eval:gsm8k): its few-shot, filters and metrics"
    source: ClassVar[str] = "https://github.com/EleutherAI/lm-evaluation-harness"
    subsets: ClassVar[tuple[str, ...]] = ()
    default_subset: ClassVar[str] = ""
    ctx: ClassVar[Literal["needed", "optional", "none"]] = "none"
    options_class: ClassVar[type[Options]] = LmEvalOptions

    def __init__(self, codec: Codec, options: Options | None = None) -> None:
        super().__init__(codec, options)
        if not isinstance(self.options, LmEvalOptions) or not isinstance(codec, TextCodec):
            raise TypeError("lm_eval takes LmEvalOptions and a TextCodec")
        self._codec, self._options = codec, self.options
        self._tasks: dict[str, LiveTask] = {}
        self._identities: dict[str, str] = {}

    @classmethod
    def check_subset(cls, subset: str) -> None:
        """Refuses what can be no task; whether there is one may depend on include_path: see `check_request`."""
        lm_eval_folder()
        if subset in ("", "all"):
            raise UserError("name an lm-eval task: --task lm_eval:gsm8k ('dllm-bench lm-eval ls tasks' lists them)")

    @classmethod
    def check_request(cls, subsets: Sequence[str], options: Options) -> None:
        """Raises UserError for a task that does not exist, naming the nearest one."""
        assert isinstance(options, LmEvalOptions)
        for subset in subsets:
            find(subset, options.include_path)

    def budget(self, subset: str) -> int:
        """The task's max_gen_toks (lm-eval's default: 256); 1 for likelihood tasks, which generate nothing."""
        live = self._task(subset)
        return budget_of(live.task.config.generation_kwargs or {}) if live.generates else 1

    def size(self, subset: str) -> int:
        """Number of documents."""
        return len(self._task(subset).docs)

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        """Document `index`, with the prompt that lm-eval gives it."""
        live = self._task(subset)
        if not 0 <= index < len(live.docs):
            raise UserError(f"lm-eval task '{subset}' has {len(live.docs)} documents, and no number {index}")
        chat = bool(self._codec.template.turn)
        requests = live.requests(
            index,
            system_instruction=self._options.system_instruction,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat and self._options.fewshot_as_multiturn,
            chat_template=self._chat if chat else None,
        )
        shared: dict[str, Any] = {"task": self.name, "subset": subset, "index": index, "seed": seed}
        facts, references = live.facts(index), live.references(index)
        if live.generates:
            context, arguments = requests[0].args[:2]
            ids, stops = tuple(self._codec.bare(context)), stops_of(arguments)
            return Sample(
                **shared, prompt_ids=ids, references=references, gen_length=gen_length, until=stops, meta=facts
            )
        if gen_length != 1:
            raise UserError(f"lm-eval task '{subset}' is judged by likelihoods: leave --gen-length out")
        pairs = tuple((tuple(context), tuple(answer)) for context, answer in map(self._pair, requests))
        choices = Choices(pairs, self._options.mc_num, self._options.mc_batch, seed, live.asks_greedy)
        longest = max(max(len(answer) for _, answer in pairs), 1)
        return Sample(
            **shared,
            prompt_ids=max((context for context, _ in pairs), key=len),
            references=references,
            gen_length=longest,
            meta=facts,
            choices=choices,
        )

    @classmethod
    def grade(cls, subset: str, answer: Answer) -> dict[str, float]:
        """lm-eval's metrics by "metric,filter" that are a number per answer; "score" is the first of them."""
        scorer, values = _values(subset, answer)
        shares = {key: value for key, value in values.items() if scorer.is_share(key)}
        if not shares:
            raise UserError(f"lm-eval task '{subset}' gave this answer no score of its own: {', '.join(values)}")
        for key, value in shares.items():
            if not 0 <= value <= 1:
                raise UserError(f"lm-eval task '{subset}': {key} is {value}, which is no share in 0..1")
        score = float(next(iter(shares.values())))
        return {"score": score, **{key: float(value) for key, value in shares.items()}}

    @classmethod
    def aggregate(cls, subset: str, answers: Sequence[Answer], grades: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """lm-eval's value of each "metric,filter" over all answers: shares in percent, others as lm-eval has them."""
        found: dict[str, Any] = {"score": round(100 * sum(g["score"] for g in grades) / len(grades), 2)}
        graded = [_values(subset, answer) for answer in answers]
        scorer = graded[0][0]
        for key in graded[0][1]:
            value = scorer.aggregate(key, [values[key] for _, values in graded])
            found[key] = round(100 * value, 2) if scorer.is_share(key) else value
        return found

    def fetch(self, subset: str) -> list[str]:
        """Loads the task, and with it its data."""
        live = self._task(subset)
        return [f"lm-eval task {subset}: {len(live.docs)} documents"]

    def data(self, subset: str) -> str | None:
        """Versions of lm-eval and of the task, and the hash of its definition, questions and few-shot examples."""
        if subset not in self._identities:
            self._identities[subset] = self._task(subset).identity()
        return self._identities[subset]

    def _task(self, subset: str) -> LiveTask:
        if subset not in self._tasks:
            from dllm_bench.tasks.lm_eval_tasks import Definition, LiveTask

            options = self._options
            definition = Definition(subset, options.include_path, options.metadata)
            self._tasks[subset] = LiveTask(definition, options.data, options.num_fewshot, options.fewshot_seed)
        return self._tasks[subset]

    def _chat(self, history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        return chat_text(self._codec, history, add_generation_prompt)

    def _pair(self, request: Any) -> tuple[list[int], list[int]]:
        return answer_pair(self._codec, *request.args[:2])


_SCORERS: dict[tuple[Any, ...], Scorer] = {}


def _scorer(subset: str, facts: Mapping[str, Any]) -> Scorer:
    """The scorer of a task: made once per set of fields, since any document with them serves."""
    from dllm_bench.tasks.lm_eval_tasks import Definition, Scorer

    definition = Definition(subset, facts.get("include_path"), facts.get("metadata"))
    key = (definition, *sorted(facts["doc"]))
    if key not in _SCORERS:
        _SCORERS[key] = Scorer(definition, facts["doc"])
    return _SCORERS[key]


def _values(subset: str, answer: Answer) -> tuple[Scorer, dict[str, Any]]:
    """The scorer of an answer, and what lm-eval gives the answer."""
    facts = answer.facts
    if not isinstance(facts.get("doc"), Mapping):
        raise UserError(f"an answer to lm-eval task '{subset}' needs its document: field 'doc'")
    scorer = _scorer(subset, facts)
    if scorer.generates:
        return scorer, scorer.values(facts, [answer.prediction])
    try:
        answers = [(float(value), bool(greedy)) for value, greedy in json.loads(answer.prediction)]
    except (ValueError, TypeError):
        raise UserError(
            f"lm-eval task '{subset}' is judged by likelihoods: a prediction is a JSON list of [log-likelihood, greedy]"
        ) from None
    return scorer, scorer.values(facts, answers)
