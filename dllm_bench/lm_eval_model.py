"""dllm-bench as a model of lm-eval: importing this registers it there as `dllm_bench`.

    arguments = {"pretrained": "tiny", "method": "fast_dllm"}
    lm_eval.simple_evaluate(model="dllm_bench", model_args=arguments, tasks=["gsm8k"])

Model arguments: those of `lm_eval_arguments.ModelOptions`, every decode setting but fill, and the method's options,
each as PART.KEY=VALUE (wavefilter.levels=3), or together as set=KEY=VALUE;KEY=VALUE.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from dllm_bench import __version__, api
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.errors import UserError, choice
from dllm_bench.lm_eval_arguments import Arguments
from dllm_bench.lm_eval_requests import NOT_INSTALLED, answer_pair, budget_of, chat_text, start_ids, stops_of
from dllm_bench.running.choices import Judge
from dllm_bench.running.rows import cut_at
from dllm_bench.running.spec import decode_settings

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM, CacheHook, hash_args
    from lm_eval.api.registry import register_model
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
    from tqdm import tqdm
except ModuleNotFoundError:
    raise UserError(NOT_INSTALLED) from None

__all__ = ["DllmBenchLM"]

_LOG = logging.getLogger(__name__)
_MARK = "dllm_bench"
A = TypeVar("A")


@register_model("dllm_bench")
class DllmBenchLM(LM):  # type: ignore[misc]  # lm-eval has no types
    """A diffusion language model under any method; requests are answered one by one, in order.

    Attributes:
        identity: hash of everything but the request that decides an answer; part of each key in lm-eval's cache.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.arguments = Arguments.parse(given)
        options = self.arguments.options
        self.model = api.load_model(**self.arguments.loading())
        self.codec = self.model.codec
        self._judge = Judge(self.model, api.loglikelihood, api.generate)
        self._estimate = {"mc_num": options.mc_num, "batch": options.mc_batch, "seed": options.seed}
        self.identity = hashlib.sha256(json.dumps(self._facts(), sort_keys=True).encode()).hexdigest()[:32]
        self._told = False

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> DllmBenchLM:
        """From model_args and lm-eval's own flags (batch_size, device), of which model_args count first."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        # lm-eval asks for its default GPU wherever no --device is given
        if flags.get("device") == EvaluatorConfig().device and not torch.cuda.is_available():
            del flags["device"]
        return cls(**{**flags, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> DllmBenchLM:
        """The same from `key=value,key=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # -- requests ---------------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """One text per request, cut at EOS and at the request's stop strings; the request's arguments stay as they are.

        Raises UserError, before anything is decoded, for decode settings that do not fit a request's budget.
        """
        budgets = {budget: self._settings(budget) for budget in {budget_of(one.args[1]) for one in requests}}
        spent: Counter[str] = Counter()

        def answer(context: str, arguments: Mapping[str, Any], number: int) -> str:
            ids = self.codec.bare(context)
            seed = self._private_seed(ids, number)
            decode = replace(budgets[budget_of(arguments)], seed=seed)
            made = api.generate(self.model, ids, self.arguments.method, decode=decode)
            spent.update(passes=made.nfe, tokens=made.useful_tokens, milliseconds=round(1000 * made.seconds["total"]))
            if made.masks_left:
                _LOG.error("%d masks were left in an answer: it counts as none", made.masks_left)
                return ""
            return cut_at(self.codec.decode(made.output_ids[: made.useful_tokens]), stops_of(arguments))

        texts = list(self._each("generate_until", requests, answer, disable_tqdm))
        _LOG.info(
            "%s: %d passes, %d useful tokens in %.1f s of decoding",
            self.arguments.method.label, spent["passes"], spent["tokens"], spent["milliseconds"] / 1000,
        )  # fmt: skip
        return texts

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood, is_greedy) per request: a Monte-Carlo estimate of a lower bound, by uncached passes; and
        whether the method's greedy decoding, one token per pass, gives the answer (False with check_greedy=false)."""
        self._tell_uncached()

        def answer(context: str, continuation: str, number: int) -> tuple[float, bool]:
            pair = answer_pair(self.codec, context, continuation)
            asked = self.arguments.options.check_greedy
            return self._likelihood(*pair), asked and self._judge.greedy(*pair, self.arguments.method)[0]

        return list(self._each("loglikelihood", requests, answer, disable_tqdm))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood per text: the same estimate for the whole text behind BOS; a text that is longer than the
        model's positions in disjoint windows, each behind as much of its past as fits."""
        self._tell_uncached()

        def answer(text: str, number: int) -> float:
            windows = get_rolling_token_windows(
                token_list=self.codec.encode(text),
                prefix_token=start_ids(self.codec)[0],
                max_seq_len=self.model.max_positions - 1,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            return sum(self._likelihood(*pair) for pair in pairs)

        return list(self._each("loglikelihood_rolling", requests, answer, disable_tqdm))

    def _each(
        self, kind: str, requests: Sequence[Instance], answer: Callable[..., A], disable_tqdm: bool
    ) -> Iterator[A]:
        """Answers in order: from the cache, or computed and put there at once. Repeats of a request have numbers."""
        seen: Counter[str] = Counter()
        for request in tqdm(requests, desc=kind, disable=disable_tqdm):
            repeat = hash_args(kind, request.args)
            key = (*request.args, self.identity, seen[repeat])
            held = self.cache_hook.dbdict
            kept = None if held is None else held.get(hash_args(kind, key))
            if kept is None:
                kept = answer(*request.args, seen[repeat])
                self.cache_hook.add_partial(kind, key, kept)
            seen[repeat] += 1
            yield kept

    # -- prompts ----------------------------------------------------------------------------------------------------

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation in the model's chat template; BOS is part of it and not added again."""
        return chat_text(self.codec, chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template as a conversation with placeholders; a name must be the model's own template."""
        if not chat_template:
            return None
        own = self.codec.template
        if isinstance(chat_template, str) and chat_template != own.name:
            raise choice("chat template (model_args chat_template names another):", chat_template, [own.name])
        return own.chat([("system", "{system}"), ("user", "{user}")])

    @property
    def tokenizer_name(self) -> str:
        """Tokenizer and template by their hash, for lm-eval's cache of requests."""
        return f"dllm_bench-{self.codec.identity()}"

    @property
    def max_length(self) -> int:
        """Positions that the model was made for; longer prompts are decoded whole, never cut."""
        return self.model.max_positions

    # -- cache and report -------------------------------------------------------------------------------------------

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes lm-eval's cache. Its own keys know requests only, so one file serves one model, method and settings.

        Raises UserError for a file that holds answers of another one.
        """
        held = cache_hook.dbdict
        if held is not None:
            if len(held) and held.get(_MARK) != self.identity:
                raise UserError(
                    f"the cache {held.filename} holds answers of another model, method or setting: "
                    "give --use_cache another path"
                )
            held[_MARK] = self.identity
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results beside the model arguments."""
        return {"dllm_bench": {**self._facts(), "identity": self.identity}}

    def _facts(self) -> dict[str, Any]:
        """All that decides an answer, beside the request."""
        model, method = self.model, self.arguments.method
        return {
            "package_version": __version__,
            "model_fingerprint": model.fingerprint,
            "dtype": model.dtype,
            "rope_scaling": model.rope_scaling,
            "codec": self.codec.identity(),
            "method": method.name,
            "method_options": method.options,
            "decode": {**model.decode_defaults, **self.arguments.decode},
            "check_greedy": self.arguments.options.check_greedy,
            **self._estimate,
        }

    def _settings(self, budget: int) -> DecodeSettings:
        settings = decode_settings(self.arguments.decode, budget, self.model.decode_defaults, self.model.family)
        self.arguments.method.build().check(settings)
        return settings

    def _likelihood(self, context: Sequence[int], answer: Sequence[int]) -> float:
        return api.loglikelihood(self.model, context, answer, **self._estimate).value

    def _private_seed(self, ids: Sequence[int], number: int) -> int:
        facts = json.dumps([self.arguments.options.seed, list(ids), number])
        return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:4], "big") >> 1

    def _tell_uncached(self) -> None:
        if not self._told and not self.arguments.method.build().uncached:
            self._told = True
            _LOG.warning(
                "likelihoods are estimated by independent uncached passes: method %s takes no part in them",
                self.arguments.method.label,
            )
