"""The 21 data sets of LongBench v1: prompts, budgets, metrics, and which of them go without a chat template.

Source: `config/dataset2prompt.json`, `dataset2maxlen.json`, `pred.py` and `eval.py` of THUDM/LongBench. lm-eval 0.4.13
has the same wording but for triviaqa and samsum (one newline before the question), passage_count and
passage_retrieval_en (no blank at the end), lcc and repobench-p (no newline at the end); here the official texts hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["EXTENDED", "GROUPS", "SETS", "DataSet", "base_name"]

Metric = Literal[
    "qa_f1", "qa_f1_zh", "rouge", "rouge_zh", "classification", "count", "retrieval", "retrieval_zh", "code_sim"
]


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        budget: tokens to generate.
        prompt: the user's words, with {context} once and {input} behind it or not at all.
        template: whether the prompt goes into the model's chat template.
        first_line: whether only the answer's first line is scored, leading newlines left out.
        until: stop strings.
        extended: whether LongBench-E has it too.
    """

    metric: Metric
    budget: int
    language: Literal["en", "zh", "code"]
    prompt: str
    template: bool = True
    first_line: bool = False
    until: tuple[str, ...] = ()
    extended: bool = False

    def around(self, question: str) -> tuple[str, str]:
        """The prompt before and after the context. Braces in texts are only braces: the template alone is formatted."""
        before, after = self.prompt.split("{context}")
        return before, question.join(after.split("{input}"))

    @property
    def asks(self) -> bool:
        """Whether the prompt has a place for an input."""
        return "{input}" in self.prompt


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_QASPER = (
    "If the question cannot be answered based on the information in the article, "
    'write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
    "Do not provide any explanation.\n\n"
)
_CONCISE = "using a single phrase if possible. Do not provide any explanation.\n\n"

SETS: dict[str, DataSet] = {
    # "asconcisely" is how the official prompt is spelled
    "narrativeqa": DataSet(
        "qa_f1",
        128,
        "en",
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question asconcisely as you can, {_CONCISE}Story: {{context}}\n\n"
        f"Now, answer the question based on the story asconcisely as you can, {_CONCISE}Question: {{input}}\n\nAnswer:",
    ),
    "qasper": DataSet(
        "qa_f1",
        128,
        "en",
        "You are given a scientific article and a question. "
        f"Answer the question as concisely as you can, using a single phrase or sentence if possible. {_QASPER}"
        "Article: {context}\n\n Answer the question based on the above article as concisely as you can, "
        f"using a single phrase or sentence if possible. {_QASPER}Question: {{input}}\n\nAnswer:",
        extended=True,
    ),
    "multifieldqa_en": DataSet(
        "qa_f1",
        64,
        "en",
        "Read the following text and answer briefly.\n\n{context}\n\n"
        "Now, answer the following question based on the above text, "
        "only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        extended=True,
    ),
    "multifieldqa_zh": DataSet(
        "qa_f1_zh",
        64,
        "zh",
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
    ),
    "hotpotqa": DataSet("qa_f1", 32, "en", _PASSAGES, extended=True),
    "2wikimqa": DataSet("qa_f1", 32, "en", _PASSAGES, extended=True),
    "musique": DataSet("qa_f1", 32, "en", _PASSAGES),
    "dureader": DataSet(
        "rouge_zh",
        128,
        "zh",
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
    ),
    "gov_report": DataSet(
        "rouge",
        512,
        "en",
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        extended=True,
    ),
    "qmsum": DataSet(
        "rouge",
        512,
        "en",
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
    ),
    "multi_news": DataSet(
        "rouge",
        512,
        "en",
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        extended=True,
    ),
    "vcsum": DataSet(
        "rouge_zh",
        512,
        "zh",
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
    ),
    "trec": DataSet(
        "classification",
        64,
        "en",
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        template=False,
        first_line=True,
        extended=True,
    ),
    "triviaqa": DataSet(
        "qa_f1",
        32,
        "en",
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        template=False,
        first_line=True,
        extended=True,
    ),
    # generation ends at a newline, which may not be its first token
    "samsum": DataSet(
        "rouge",
        128,
        "en",
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        template=False,
        first_line=True,
        until=("\n",),
        extended=True,
    ),
    "lsht": DataSet(
        "classification",
        64,
        "zh",
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        template=False,
        first_line=True,
    ),
    "passage_count": DataSet(
        "count",
        32,
        "en",
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are after removing "
        "duplicates. In other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. "
        "The output format should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        extended=True,
    ),
    "passage_retrieval_en": DataSet(
        "retrieval",
        32,
        "en",
        "Here are 30 paragraphs from Wikipedia, along with an abstract. "
        "Please determine which paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n"
        "{input}\n\nPlease enter the number of the paragraph that the abstract is from. "
        'The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        extended=True,
    ),
    "passage_retrieval_zh": DataSet(
        "retrieval_zh",
        32,
        "zh",
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
    ),
    "lcc": DataSet(
        "code_sim",
        64,
        "code",
        "Please complete the code given below. \n{context}Next line of code:\n",
        template=False,
        extended=True,
    ),
    "repobench-p": DataSet(
        "code_sim",
        64,
        "code",
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        template=False,
        extended=True,
    ),
}

EXTENDED = tuple(f"{name}_e" for name, one in SETS.items() if one.extended)
"""LongBench-E: the same tasks with lengths spread evenly."""

GROUPS: dict[str, tuple[str, ...]] = {
    "all": tuple(SETS),
    **{kind: tuple(name for name, one in SETS.items() if one.language == kind) for kind in ("en", "zh", "code")},
    "e": EXTENDED,
}


def base_name(subset: str) -> str:
    """The data set of a subset: without the suffix of LongBench-E."""
    return subset.removesuffix("_e") if subset in EXTENDED else subset
