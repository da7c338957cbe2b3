"""Nothing survives a request, and nothing of the caller's is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import model
from tiny_checkpoints import llada_config, loaded, write

from dllm_bench import UserError, generate
from dllm_bench.caching.method import Method, Output
from dllm_bench.caching.rows import Rows
from dllm_bench.caching.shared import Shared
from dllm_bench.caching.spec import parse_method
from dllm_bench.decoding.canvas import Canvas
from dllm_bench.decoding.loop import denoise
from dllm_bench.decoding.settings import DecodeSettings
from dllm_bench.decoding.windows import Window

LLADA, DREAM = "llada_fastdllm", "dream_fastdllm"
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("baseline", {}),
    ("fast_dllm", {}),
    ("fast_dllm", {"mode": "prefix"}),
    ("acache", {}),
    ("acache", {"drop_non_anchor": True}),
]
every_method = pytest.mark.parametrize(("method", "options"), METHODS)
both_families = pytest.mark.parametrize("name", [LLADA, DREAM])
PROMPT = list(range(3, 14))


@both_families
@every_method
def test_the_same_request_gives_the_same(method: str, options: dict[str, Any], name: str) -> None:
    decode = {"gen_length": 16, "block_length": 8, "temperature": 0.7, "tokens_per_pass": 3, "seed": 5}

    def run(prompt: list[int], length: int = 16) -> tuple[Any, ...]:
        r = generate(model(name), prompt, method, options, {**decode, "gen_length": length}, trace=True)
        return r.output_ids, r.nfe, r.row_layers, r.passes, r.cache_bytes_peak

    prompt, first = list(PROMPT), run(PROMPT)
    run([1, 2], 24)
    assert run(prompt) == first and prompt == PROMPT
    assert run(tuple(PROMPT)) == first == run(torch.tensor(PROMPT))  # type: ignore[arg-type]


class Spy:
    """Builds methods and keeps them, to look at what they hold afterwards."""

    def __init__(self, method: str, options: dict[str, Any]) -> None:
        self.spec, self.built = parse_method(method, options), list[Method]()

    def __call__(self) -> Method:
        self.built.append(self.spec.build())
        return self.built[-1]


def held(method: Method) -> list[str]:
    """Tensors that the method or its memory still refers to, however deep in lists."""
    found: list[str] = []

    def look(path: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.append(path)
        elif isinstance(value, list | tuple):
            for v in value:
                look(path, v)
        elif isinstance(value, dict):
            look(path, list(value.values()))
        elif isinstance(value, Rows | Shared):
            look(path, list(vars(value).values()))

    for owner in (method, method.memory):
        for key, value in vars(owner).items():
            look(f"{type(owner).__name__}.{key}", value)
    return found


def decode_with(spy: Spy, name: str, settings: DecodeSettings, on_pass: Any = None) -> None:
    net = model(name).network
    denoise(net, Canvas.make(PROMPT, settings, net.config, net.device), spy, settings, on_pass)


@both_families
@every_method
@pytest.mark.parametrize("cfg", [0.0, 1.5])
def test_methods_hold_nothing_in_the_end(method: str, options: dict[str, Any], name: str, cfg: float) -> None:
    spy, sizes = Spy(method, options), list[int]()
    settings = DecodeSettings.make({"gen_length": 8, "block_length": 4, "cfg_scale": cfg}, model(name).family)
    decode_with(spy, name, settings, lambda *_: sizes.append(sum(spy.built[0].bytes().values())))
    assert len(spy.built) == (2 if cfg else 1)
    assert (max(sizes) > 0) == (method != "baseline")
    for made in spy.built:
        assert sum(made.bytes().values()) == 0 and held(made) == [] and not hasattr(made, "request")


@every_method
@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt, RuntimeError])
def test_an_error_in_the_middle_ends_the_method(method: str, options: dict[str, Any], error: type) -> None:
    spy, seen = Spy(method, options), list[Window]()
    settings = DecodeSettings.make({"gen_length": 8, "block_length": 4, "cfg_scale": 1.0}, "llada")

    def stop(window: Window, output: Output, decision: Any) -> None:
        seen.append(window)
        if len(seen) == 3:
            raise error("in the middle")

    before = generate(model(LLADA), PROMPT, method, options, settings)
    with pytest.raises(error):
        decode_with(spy, LLADA, settings, stop)
    assert len(seen) == 3
    assert all(held(m) == [] and not hasattr(m, "request") for m in spy.built)
    assert generate(model(LLADA), PROMPT, method, options, settings).output_ids == before.output_ids


def test_a_rule_that_fails_to_start_ends_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    from dllm_bench.decoding import loop

    def fail(*_: Any) -> None:
        raise UserError("no rule")

    spy = Spy("fast_dllm", {})
    monkeypatch.setattr(loop, "make_rule", fail)
    with pytest.raises(UserError):
        decode_with(spy, LLADA, DecodeSettings.make({"gen_length": 4}, "llada"))
    assert not hasattr(spy.built[0], "request")


@both_families
@pytest.mark.parametrize("mode", ["dual", "prefix"])
def test_one_block_of_the_whole_response(mode: str, name: str) -> None:
    """No suffix is stale then: dual and prefix do the same."""
    decode = {"gen_length": 24, "block_length": 24, "threshold": 0.5}
    run = generate(model(name), PROMPT, "fast_dllm", {"mode": mode}, decode, trace=True)
    other = generate(model(name), PROMPT, "fast_dllm", {"mode": "dual"}, decode, trace=True)
    assert (run.masks_left, run.dense_passes) == (0, 1)
    assert (run.output_ids, run.passes) == (other.output_ids, other.passes)


@both_families
@every_method
@pytest.mark.parametrize(("prompt", "gen", "block"), [(1, 8, 4), (1, 1, 1), (3, 600, 600), (2, 6, 1)])
def test_odd_sizes(method: str, options: dict[str, Any], name: str, prompt: int, gen: int, block: int) -> None:
    decode = {"gen_length": gen, "block_length": block, "threshold": 0.0, "eos_stop": False}
    decode["steps"] = gen // block
    run = generate(model(name), PROMPT[:prompt], method, options, decode)
    mask = model(name).config.mask_id
    assert len(run.output_ids) == run.canvas_tokens == gen and run.masks_left == 0 and mask not in run.output_ids
    probes = run.probe is not None
    assert gen // block <= run.nfe - probes <= 2 * (gen // block)


def test_methods_may_be_stated_as_a_parsed_spec() -> None:
    spec = parse_method("fast_dllm", ["mode=prefix"])
    run = generate(model(LLADA), PROMPT, spec, None, {"gen_length": 4})
    assert (
        run.output_ids == generate(model(LLADA), PROMPT, "fast_dllm", {"mode": "prefix"}, {"gen_length": 4}).output_ids
    )
    with pytest.raises(UserError, match="has its options already"):
        generate(model(LLADA), PROMPT, spec, {"mode": "dual"})


@pytest.mark.parametrize(
    "prompt", [[3.7, 1], ["1", "2"], "12", None, [[1, 2]], torch.ones(1, 3), torch.ones(2, 3).long(), [None]]
)
def test_prompts_that_are_no_ids(prompt: Any) -> None:
    with pytest.raises(UserError, match="list of whole numbers"):
        generate(model(LLADA), prompt, decode={"gen_length": 4})


def test_logits_that_are_not_finite_stop_the_sample(tmp_path: Path) -> None:
    broken = loaded(write(tmp_path, llada_config()))
    broken.network.weights.head.fill_(float("nan"))
    with pytest.raises(ArithmeticError, match="pass 1 are not finite"):
        generate(broken, [1, 2, 3], "baseline", {}, {"gen_length": 4})


def test_decode_takes_the_flag_by_its_own_name() -> None:
    assert not DecodeSettings.make({"no_eos_stop": True}, "llada").eos_stop
    assert DecodeSettings.make({"no_eos_stop": False}, "llada").eos_stop
