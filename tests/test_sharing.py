"""Samples that share state: equal answers with and without it, made once per span, booked apart from decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import ToyCodec, ToyGenerate, ToyModel, ToyTask
from golden_cases import model as golden_model
from test_runner import HERE, Silent, cells_of, one_request

from dllm_bench import UserError, generate, prepare
from dllm_bench.caching.memory import DenseMemory
from dllm_bench.caching.method import Method
from dllm_bench.caching.shared import Shared
from dllm_bench.caching.spec import MethodSpec, parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.methods.acache import ACache
from dllm_bench.methods.fast_dllm import FastDllm
from dllm_bench.models.hub import Model
from dllm_bench.running.runner import Cell, Runner
from dllm_bench.running.sharing import Sharing
from dllm_bench.running.store import Store
from dllm_bench.running.task import TASKS, Sample

ANSWER = {"gen_length": 16, "block_length": 8, "threshold": 0.6}


class SharedTask(ToyTask):
    """Two questions to each text of 60 ids; the text is the affix."""

    name = "shared_task"

    def budget(self, subset: str) -> int:
        return 16

    def sample(self, subset: str, index: int, *, ctx: int | None, gen_length: int, seed: int) -> Sample:
        text = [(7 * i + 3 + index // 2) % 90 + 5 for i in range(60)]
        question = [(11 * i + 5 * index) % 90 + 5 for i in range(7)]
        ids = (*text, *question)
        spans = {"affix": ((0, 60),)}
        return Sample("shared_task", subset, index, seed, ids, ("egg",), gen_length, ctx, (), spans)


if "shared_task" not in TASKS.names():
    TASKS.register("shared_task", SharedTask)


class Golden(ToyModel):
    """The names of the toy, the network of a random model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Model = golden_model("llada_acache")
        self.codec = _Codec()


class _Codec(ToyCodec):
    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Watch:
    """`prepare` and `generate` on the golden network; remembers what was made and handed on."""

    def __init__(self) -> None:
        self.made: list[Shared | None] = []
        self.given: list[Shared | None] = []
        self.spans: list[Any] = []
        self.fails: set[int] = set()

    def prepare(self, model: Golden, ids: Sequence[int], method: MethodSpec, **more: Any) -> Shared | None:
        self.made.append(prepare(model.inner, ids, method, **more))
        return self.made[-1]

    def generate(self, model: Golden, ids: Sequence[int], **more: Any) -> Any:
        self.given.append(more.get("shared"))
        self.spans.append(more.get("span"))
        if len(self.given) in self.fails:
            raise RuntimeError("lost")
        return generate(model.inner, ids, **more)


def run(folder: Path, watch: Watch, *, sharing: bool = True, samples: int = 5, **changes: Any) -> list[dict[str, Any]]:
    model = Golden()
    values = {"methods": ["acache"], "task": "shared_task", "decode": ANSWER, "samples": samples, **changes}
    request = one_request(**values)
    store = Store(folder)
    cells = cells_of(request, model)
    given = watch.prepare if sharing else None
    Runner(model, SharedTask(model.codec), store, watch.generate, HERE, Silent(), given).run(cells)  # type: ignore[arg-type]
    return sorted(store.read(), key=lambda row: (row["method"], row["index"]))


COSTS = ("preparation_rows", "preparation_row_layers", "shared_requests", "shared_bytes", "probe_rows")


def test_the_shared_state_is_made_once_per_text(tmp_path: Path) -> None:
    rows = run(tmp_path, watch := Watch())
    assert [row["status"] for row in rows] == ["ok"] * 5
    layers = golden_model("llada_acache").config.num_layers
    assert [row["preparation_rows"] for row in rows] == [60, None, 60, None, 60]
    assert [row["preparation_row_layers"] for row in rows] == [n and n * (layers - 1) for n in (60, None, 60, None, 60)]
    assert [row["shared_requests"] for row in rows] == [1, 2, 1, 2, 1]
    assert [row["preparation_seconds"] is None for row in rows] == [False, True, False, True, False]
    first = watch.made[0]
    assert first is not None and [row["shared_bytes"] for row in rows] == [sum(first.bytes().values())] * 5
    # the probe runs over all that is not affix, and its time is a part of decoding
    assert [row["probe_rows"] for row in rows] == [7 + 16] * 5
    assert all(0 < row["probe_seconds"] < row["decode_seconds"] for row in rows)
    assert watch.given == [None, *watch.made] and watch.made[0] is watch.made[1] is not watch.made[2]
    assert watch.spans == [(0, 60)] * 6, "the warm-up too"


def test_answers_do_not_depend_on_sharing_or_on_order(tmp_path: Path) -> None:
    together, alone = run(tmp_path / "a", Watch()), run(tmp_path / "b", Watch(), sharing=False)
    told = ("key", "index", "output_ids", "text", "score", "nfe", "row_layers", "cache_bytes", "probe_rows")
    assert [[row[name] for name in told] for row in together] == [[row[name] for name in told] for row in alone]
    # without a shared object each sample pays for its own
    assert [row["preparation_rows"] for row in alone] == [60] * 5
    assert all(row["shared_requests"] is None and row["shared_bytes"] is None for row in alone)
    # the second half of a text alone: what was made for the first is gone, and the answer is the same
    watch, folder = Watch(), tmp_path / "c"
    model = Golden()
    cell = cells_of(one_request(methods=["acache"], task="shared_task", decode=ANSWER), model)[0]
    store = Store(folder)
    runner = Runner(
        model,  # type: ignore[arg-type]
        SharedTask(model.codec),
        store,
        watch.generate,
        HERE,
        Silent(),
        watch.prepare,
    )
    for row in together[::2]:
        store.append({k: v for k, v in row.items() if k != "schema_version"})
    runner.run([Cell(cell.spec, 4)])
    resumed = {row["index"]: row for row in store.read()}
    assert [resumed[i]["output_ids"] for i in range(4)] == [row["output_ids"] for row in together[:4]]
    assert resumed[1]["preparation_rows"] == 60 and resumed[1]["shared_requests"] == 1


def test_requests_never_write_what_they_share(tmp_path: Path) -> None:
    class Checked(Watch):
        def generate(self, model: Golden, ids: Sequence[int], **more: Any) -> Any:
            shared = more.get("shared")
            before = shared.checksum() if shared is not None else None
            made = super().generate(model, ids, **more)
            assert shared is None or shared.checksum() == before
            return made

    assert {row["error"] for row in run(tmp_path, Checked())} == {None}


def test_methods_that_share_nothing_are_asked_for_nothing(tmp_path: Path) -> None:
    rows = run(tmp_path, watch := Watch(), methods=["fast_dllm"], samples=2)
    assert watch.made == [] and watch.spans == [None] * 3
    assert {row[name] for row in rows for name in (*COSTS, "preparation_seconds", "probe_seconds")} == {None}
    assert ACache.shares() and not FastDllm.shares() and not Method.shares()
    off = run(tmp_path, Watch(), sets=["affix=none"], samples=2)
    assert {row["preparation_rows"] for row in off if row["method"] == "acache"} == {None}


def test_what_was_made_is_booked_even_where_decoding_fails(tmp_path: Path) -> None:
    watch = Watch()
    watch.fails = {2}
    rows = run(tmp_path, watch, samples=2)
    assert [(row["status"], row["preparation_rows"], row["shared_requests"]) for row in rows] == [
        ("error", 60, 1),
        ("ok", None, 2),
    ]


def test_guidance_books_what_its_second_stream_needs(tmp_path: Path) -> None:
    rows = run(tmp_path, Watch(), samples=2, decode={**ANSWER, "cfg_scale": 1.0})
    # the unconditional stream sees masks instead of the prompt, so nothing that was made serves it
    assert [row["preparation_rows"] for row in rows] == [120, 60]
    assert [row["shared_requests"] for row in rows] == [1, 2]


def test_there_are_never_two_shared_states_at_a_time() -> None:
    model = Golden()
    spec = cells_of(one_request(methods=["acache"], task="shared_task", decode=ANSWER), model)[0].spec
    reused: list[Any] = []

    def watched(model: Golden, ids: Sequence[int], method: MethodSpec, **more: Any) -> Shared | None:
        reused.append(more["reuse"])
        return prepare(model.inner, ids, method, **more)

    sharing = Sharing(model, spec, watched)  # type: ignore[arg-type]
    task = SharedTask(model.codec)
    for index in range(3):
        sharing.serve(task.sample("single", index, ctx=256, gen_length=16, seed=0), spec.decode)
    assert [state is not None for state in reused] == [False, True, False]


def test_a_task_without_an_affix_gives_no_span(tmp_path: Path) -> None:
    model, toy = ToyModel(), ToyGenerate()
    cells = cells_of(one_request(methods=["acache"], samples=2), model)
    Runner(model, ToyTask(model.codec), Store(tmp_path), toy, HERE, Silent()).run(cells)  # type: ignore[arg-type]
    assert toy.calls == [0, 1], "a stand-in that takes no span was called"


# -- nominal bytes --------------------------------------------------------------------------------------------------


class Packed(DenseMemory):
    """Keeps bytes; its paper counts half of them."""

    def nominal_bytes(self) -> dict[str, float] | None:
        return {kind: held / 2 for kind, held in self.bytes().items()}


class Above(DenseMemory):
    """Holds 7 bytes of its own over another memory."""

    def bytes(self) -> dict[str, int]:
        assert self.lower is not None
        return {**self.lower.bytes(), "extra": 7}

    def end(self) -> None:
        assert self.lower is not None
        self.lower.end()
        del self.request, self.network

    def write(self, *args: Any) -> None:
        assert self.lower is not None
        self.lower.write(*args)

    def read(self, *args: Any) -> Any:
        assert self.lower is not None
        return self.lower.read(*args)


@pytest.fixture
def decoded() -> Iterator[Any]:
    model = golden_model("llada_acache")

    def run_with(memory: Any, **decode: Any) -> Any:
        settings = DecodeSettings.make({**ANSWER, **decode}, model.family)
        canvas = Canvas.make([5, 9, 11, 40], settings, model.config, model.network.device)
        spec = parse_method("fast_dllm")
        return denoise(model.network, canvas, lambda: FastDllm(spec.build().options, memory()), settings)

    yield run_with


def test_nominal_bytes_stand_beside_the_stored_ones(decoded: Any) -> None:
    assert decoded(DenseMemory).nominal_bytes is None
    packed = decoded(Packed)
    assert packed.nominal_bytes == {kind: held / 2 for kind, held in packed.cache_bytes.items()}
    assert sum(packed.cache_bytes.values()) > 0
    stacked = decoded(lambda: Above(lower=Packed()))
    assert stacked.nominal_bytes == {**packed.nominal_bytes, "extra": 7}
    assert decoded(lambda: Above(lower=DenseMemory())).nominal_bytes is None
    both = decoded(Packed, cfg_scale=1.0)
    assert both.nominal_bytes == {kind: held / 2 for kind, held in both.cache_bytes.items()}
    assert both.nominal_bytes["keys"] == 2 * packed.nominal_bytes["keys"], "two streams"


def test_nominal_bytes_have_a_column(tmp_path: Path) -> None:
    class Nominal(ToyGenerate):
        def __call__(self, *args: Any, **more: Any) -> Any:
            return dataclasses.replace(super().__call__(*args, **more), nominal_bytes={"codes": 12.5, "bases": 100.0})

    model = ToyModel()
    for name, toy in (("plain", ToyGenerate()), ("packed", Nominal())):
        store = Store(tmp_path / name)
        Runner(model, ToyTask(model.codec), store, toy, HERE, Silent()).run(cells_of(one_request(samples=1), model))  # type: ignore[arg-type]
    told = [Store(tmp_path / name).read()[0] for name in ("plain", "packed")]
    assert [(row["cache_bytes_peak"], row["cache_bytes_nominal"]) for row in told] == [(4096, None), (4096, 112.5)]


def test_a_span_beyond_the_prompt_is_one_line(tmp_path: Path) -> None:
    class Beyond(SharedTask):
        def sample(self, *args: Any, **more: Any) -> Sample:
            return dataclasses.replace(super().sample(*args, **more), spans={"affix": ((0, 99),)})

    model, watch = Golden(), Watch()
    cells = cells_of(one_request(methods=["acache"], task="shared_task", decode=ANSWER), model)
    runner = Runner(
        model,  # type: ignore[arg-type]
        Beyond(model.codec),
        Store(tmp_path),
        watch.generate,
        HERE,
        Silent(),
        watch.prepare,
    )
    with pytest.raises(UserError, match="0:99"):
        runner.run(cells)
    assert Store(tmp_path).files() == []
