"""LongBench's scores, by the rules of THUDM/LongBench `metrics.py` and `eval.py`, as shares in 0..1.

Kept on purpose, since published numbers have them:

- rouge is rouge-l of the package `rouge` 1.0.1: sentences are parted at ".", words are sets, letters keep their case,
  and a perfect match is 0.999999995. It rebuilds the common words by recursion, so a pair of sentences of which
  `words + words - common` comes near Python's limit of 1000 calls scores 0, as every other failure does. A Chinese
  text has no ".", so it is one sentence. Each pair is scored on a stack of its own, so that the value does not depend
  on the caller; it does depend on the limit, which is to be Python's own.
- code similarity is fuzzywuzzy without python-Levenshtein, that is difflib: from 200 characters on, frequent characters
  count as junk.
- classes are taken from the list while it is walked through, so that the one behind a removed one is passed over.
- jieba 0.42.1 parts Chinese words.
"""

from __future__ import annotations

import re
import string
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any

from dllm_bench.errors import UserError

__all__ = ["METRICS", "best", "bucket", "first_line"]

# the characters that metrics.py takes out of Chinese words, beside those of string.punctuation
_CJK_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》"
    "「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_ASCII_OUT = str.maketrans("", "", string.punctuation)
_ALL_OUT = str.maketrans("", "", string.punctuation + _CJK_MARKS)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")


def first_line(prediction: str) -> str:
    """The first line behind leading newlines; a line of blanks counts."""
    return prediction.lstrip("\n").split("\n")[0]


def best(metric: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The best score over all references; 0 without any."""
    return max((METRICS[metric](prediction, reference, classes) for reference in references), default=0.0)


def bucket(length: float) -> str:
    """LongBench-E's name for a length in words (Chinese: characters)."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def _f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """F1 of two multisets of words; 0 where both are empty."""
    same = sum((Counter(prediction) & Counter(reference)).values())
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of words: lower case, without ASCII punctuation and articles."""
    return _f1(_words(prediction), _words(reference))


def _words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_ASCII_OUT)).split()


def qa_f1_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of jieba's words: lower case, without punctuation and blanks."""
    return _f1(_chinese_words(prediction), _chinese_words(reference))


def _chinese_words(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_ALL_OUT).split()) for word in _cut(text))
    return [word for word in words if word]


def rouge(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F of rouge-l; 0 for every failure (empty texts, texts of dots, too deep a recursion)."""
    found: list[float] = []
    # how deep a recursion may go depends on the depth it starts from; here it is that of the official script
    thread = threading.Thread(target=_rouge_l, args=(_rouge(), prediction, reference, found))
    thread.start()
    thread.join()
    return found[0]


def _rouge_l(rouge: Any, prediction: str, reference: str, found: list[float]) -> None:
    try:
        found.append(float(rouge.get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]))
    except Exception:  # as in metrics.py
        found.append(0.0)


def rouge_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`rouge` of jieba's words, parted by blanks."""
    return rouge(" ".join(_cut(prediction)), " ".join(_cut(reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (number of classes named) where the right one is among them; names inside the right one do not count."""
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in reference and named[place] != reference:
            # the next one moves up and is passed over
            named.remove(named[place])
        place += 1
    return 1 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the prediction that are spelled like the reference."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`count` of the number behind "Paragraph" in the reference."""
    return count(prediction, _numbered("Paragraph ", reference))


def retrieval_zh(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """`count` of the number behind "段落" in the reference."""
    return count(prediction, _numbered("段落", reference))


def _numbered(word: str, reference: str) -> str:
    found = re.search(rf"{word}(\d+)", reference)
    if found is None:
        raise UserError(f"the reference '{reference}' names no paragraph: it has to be like '{word}7'")
    return found[1]


def code_sim(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of the reference and the first line that has no `, # or //; whole percents, blanks count."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    if line == reference:
        return 1.0
    if not line or not reference:
        return 0.0
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge": rouge,
    "rouge_zh": rouge_zh,
    "classification": classification,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "code_sim": code_sim,
}


@cache
def _rouge() -> Any:
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


def _cut(text: str) -> list[str]:
    return list(_jieba().cut(text, cut_all=False))


@cache
def _jieba() -> Any:
    """jieba with its own dictionary, which is read anew: it would trust any `jieba.cache` in the temporary folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that jieba imports
        import jieba

    made = jieba.Tokenizer()
    made.FREQ, made.total = made.gen_pfdict(made.get_dict_file())
    made.initialized = True
    return made
