"""Random draws that depend on named facts alone, with the same results on every platform and Python version."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["below", "letters", "permuted", "private_random", "shuffled"]

T = TypeVar("T")


def private_random(*facts: object) -> random.Random:
    """A generator that depends on the facts alone: not on the process, the order of calls or the global state."""
    text = "\x1f".join(str(fact) for fact in facts)
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))


def below(n: int, rng: random.Random) -> int:
    """A whole number in 0..n-1."""
    # random() is the one method whose values Python promises to keep between versions
    return int(rng.random() * n)


def permuted(count: int, rng: random.Random) -> Iterator[int]:
    """The numbers 0..count-1 in random order, drawn one by one: k of them cost O(k)."""
    moved: dict[int, int] = {}
    for k in range(count):
        chosen = k + below(count - k, rng)
        yield moved.get(chosen, chosen)
        moved[chosen] = moved.get(k, k)


def shuffled(items: Sequence[T], rng: random.Random) -> list[T]:
    """The items in random order."""
    return [items[k] for k in permuted(len(items), rng)]


def letters(alphabet: str, length: int, rng: random.Random, taken: set[str]) -> str:
    """A word of random letters that is not taken yet; takes it."""
    while True:
        word = "".join(alphabet[below(len(alphabet), rng)] for _ in range(length))
        if word not in taken:
            taken.add(word)
            return word
