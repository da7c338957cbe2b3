"""Text to ids and back: fast tokenizers, and the chat templates of LLaDA and Dream as plain data."""

from __future__ import annotations

import hashlib
import json
import string
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.errors import UserError, choice

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TEMPLATES", "ChatTemplate", "TextCodec", "load_codec"]


@dataclass(frozen=True)
class ChatTemplate:
    """One user turn and the opened answer, as text with special tokens.

    Attributes:
        bos: token that starts a prompt; empty where the family has none.
        head: text before the user's words; tail: text after them, up to the place where the answer starts.
        end: the token that ends a turn; empty for a bare prompt.
        joint: text between the user's words and an answer prefix when there is no assistant turn.
        turn: what begins a turn, with {} for the role; empty for a bare prompt.
        gap: text between turns. system: words of the system turn where a conversation has none of its own.
        trims: whether words lose their outer blanks, as in LLaDA's template; Dream's, which is Qwen's, keeps them.
    """

    name: str
    bos: str
    head: str
    tail: str
    end: str
    joint: str = ""
    turn: str = ""
    gap: str = ""
    system: str = ""
    trims: bool = True

    def render(self, user: str, answer_prefix: str) -> str:
        """The whole prompt as text."""
        joint = self.joint if answer_prefix else ""
        return self.bos + self.head + self._said(user) + self.tail + joint + answer_prefix

    def chat(self, turns: Sequence[tuple[str, str]], opened: bool = True) -> str:
        """A conversation of several turns as text.

        Args:
            turns: (role, words) in order.
            opened: a new assistant turn is opened at the end; otherwise the last turn stays open as it is, to be
                continued: its words are the beginning of the answer.

        Raises UserError for a template without turns.
        """
        if not self.turn:
            raise UserError(
                f"chat template '{self.name}' has no turns: leave the chat template out, or name another one "
                f"(nearest valid: chat_template={next(t.name for t in TEMPLATES.values() if t.turn)})"
            )
        if self.system and not (turns and turns[0][0] == "system"):
            turns = [("system", self.system), *turns]
        whole, (role, words) = (turns, ("assistant", "")) if opened else (turns[:-1], turns[-1])
        text = "".join(self.turn.format(who) + self._said(said) + self.end + self.gap for who, said in whole)
        return self.bos + text + self.turn.format(role) + words

    def _said(self, words: str) -> str:
        return words.strip() if self.trims else words


# LLaDA: the shipped template with its generation prompt mended, as d2Cache and ZHZisZZ/dllm do; Dream: Qwen's ChatML.
_TURN = "<|start_header_id|>{}<|end_header_id|>\n\n"
TEMPLATES: dict[str, ChatTemplate] = {
    "llada": ChatTemplate(
        "llada",
        "<|startoftext|>",
        _TURN.format("user"),
        "<|eot_id|>" + _TURN.format("assistant"),
        "<|eot_id|>",
        turn=_TURN,
    ),
    "dream": ChatTemplate(
        "dream",
        "",
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>",
        turn="<|im_start|>{}\n",
        gap="\n",
        system="You are a helpful assistant.",
        trims=False,
    ),
    "plain": ChatTemplate("plain", "", "", "", "", joint=" "),
}
# Tokens that start a bare prompt, by family: base-model evaluations of both prepend them.
_PLAIN_BOS = ("<|startoftext|>", "<|beginoftext|>")


class TextCodec:
    """A tokenizer with its chat template; satisfies the `Codec` protocol of tasks.

    Special tokens are recognised inside rendered templates, never added by the tokenizer itself, so BOS stands exactly
    once. Text from users and tasks is tokenised the same way: a special token spelled in it counts as that token.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        # tokenizer.json may carry settings of its training run; they would cut long prompts without a word
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.template = template

    def encode(self, text: str) -> list[int]:
        """Ids of bare text: no BOS, no template."""
        try:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # lone surrogates, as Python makes them of bytes that are no UTF-8
            raise UserError("the prompt is not valid Unicode text: check the encoding it comes in") from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out; ids that the tokenizer does not know are left out too."""
        text: str = self.tokenizer.decode([i for i in ids if 0 <= i < 1 << 32], skip_special_tokens=True)
        return text

    def show(self, ids: Sequence[int]) -> str:
        """Text of ids with their special tokens spelled out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def render(self, user: str, answer_prefix: str = "", *, template: bool = True) -> str:
        """The exact prompt text; without `template` a BOS and both texts, blanks and all."""
        return self.template.render(user, answer_prefix) if template else self._bare_bos + user + answer_prefix

    def wrap(self, user: str, answer_prefix: str = "", *, template: bool = True) -> list[int]:
        """Prompt ids: template around one user turn, then the answer prefix."""
        return self.encode(self.render(user, answer_prefix, template=template))

    def bare(self, text: str) -> list[int]:
        """Ids of a whole prompt that is text already: BOS in front, unless it begins with it or with a turn."""
        bos = next((t for t in (self.template.bos, *_PLAIN_BOS) if self.token_id(t) is not None), "")
        opening = self.template.turn.partition("{}")[0]
        begun = any(start and text.startswith(start) for start in (bos, opening))
        return self.encode(text if begun else bos + text)

    def token_id(self, token: str) -> int | None:
        """The id of a token, None where the tokenizer has none."""
        found: int | None = self.tokenizer.token_to_id(token) if token else None
        return found

    @cached_property
    def _bare_bos(self) -> str:
        """The token that starts a bare prompt; empty where the tokenizer has none of them."""
        return next((token for token in _PLAIN_BOS if self.token_id(token) is not None), "")

    @cached_property
    def delimiter_ids(self) -> frozenset[int]:
        """Tokens that part a text: line breaks, punctuation, and special tokens, those of chat templates among them."""
        special = {i for i, token in self.tokenizer.get_added_tokens_decoder().items() if token.special}
        plain = sorted(set(self.tokenizer.get_vocab(with_added_tokens=True).values()) - special)
        texts = self.tokenizer.decode_batch([[i] for i in plain], skip_special_tokens=False)
        return frozenset(special | {i for i, text in zip(plain, texts, strict=True) if _parts(text)})

    def identity(self) -> str:
        """Hash of tokenizer and template."""
        return self._identity

    @cached_property
    def _identity(self) -> str:
        parts = [self.tokenizer.to_str(), self.template.name, self.template.render(" \x00 ", "\x01")]
        return hashlib.sha256("\x02".join(parts).encode()).hexdigest()[:16]


def _parts(text: str) -> bool:
    """Whether a token is nothing but punctuation, or a blank with a line break in it."""
    inner = text.strip()
    if not inner:
        return "\n" in text or "\r" in text
    return all(c in string.punctuation or unicodedata.category(c).startswith("P") for c in inner)


def load_codec(folder: Path, family: str, template: str = "auto") -> TextCodec | None:
    """The codec of a checkpoint folder; None when it ships no tokenizer.

    `template` is a name of TEMPLATES, or "auto": the family's own when the tokenizer has its tokens, else "plain".
    """
    if template != "auto" and template not in TEMPLATES:
        raise choice("chat template", template, ["auto", *TEMPLATES])
    tokenizer = _load_tokenizer(folder)
    if tokenizer is None:
        return None
    chosen = TEMPLATES[template] if template != "auto" else _auto(tokenizer, family)
    missing = [t for t in (chosen.bos, chosen.end) if t and tokenizer.token_to_id(t) is None]
    if missing:
        raise UserError(
            f"{folder}: chat template '{chosen.name}' needs {missing[0]}; nearest valid: --chat-template plain"
        )
    if chosen.name == "plain":
        bos = next((t for t in _PLAIN_BOS if tokenizer.token_to_id(t) is not None), "")
        chosen = ChatTemplate("plain", bos, "", "", "", joint=" ")
    return TextCodec(tokenizer, chosen)


def _auto(tokenizer: Tokenizer, family: str) -> ChatTemplate:
    own = TEMPLATES.get(family, TEMPLATES["plain"])
    fits = all(tokenizer.token_to_id(t) is not None for t in (own.bos, own.end) if t)
    return own if fits and own.end else TEMPLATES["plain"]


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    """tokenizer.json directly; otherwise (vocab.json + merges.txt) through transformers' conversion."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise UserError(f"{path} is not a tokenizer file: {error}") from None
    if not (folder / "vocab.json").is_file() or not (folder / "merges.txt").is_file():
        return None
    return _converted(folder)


def _converted(folder: Path) -> Tokenizer:
    """A byte-level BPE from vocab.json and merges.txt (Dream ships these), with the added tokens of its config."""
    from tokenizers import Regex as TokenRegex
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    try:
        bpe = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{folder}: vocab.json and merges.txt are no byte-level BPE: {error}") from None
    made: Any = Tokenizer(bpe)
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(TokenRegex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    _add_tokens(made, folder / "tokenizer_config.json")
    return made  # type: ignore[no-any-return]


def _add_tokens(made: Any, path: Path) -> None:
    """Adds the tokens of tokenizer_config.json; each must get the id that the file gives it."""
    from tokenizers import AddedToken

    if not path.is_file():
        return
    try:
        table = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        wanted = sorted((int(i), entry["content"], bool(entry.get("special"))) for i, entry in table.items())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a readable tokenizer config: {error!r}") from None
    for number, content, special in wanted:
        token = AddedToken(content, special=special, normalized=False)
        (made.add_special_tokens if special else made.add_tokens)([token])
        if made.token_to_id(content) != number:
            found = made.token_to_id(content)
            raise UserError(f"{path}: token {content} would get id {found} behind vocab.json, not {number}")
