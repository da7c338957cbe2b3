"""The command line: one line on stderr and code 2 for every mistake, and exactly the documented output otherwise."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden_cases import GOLDEN, model
from test_text import LLADA_SPECIALS, byte_level
from tiny_checkpoints import llada_config, write

import dllm_bench
from dllm_bench import UserError, generate

ROOT = Path(__file__).parent.parent
LLADA, DREAM = str(GOLDEN / "llada_fastdllm"), str(GOLDEN / "dream_fastdllm")
Called = tuple[int, str, str]
Call = Callable[..., Called]


@pytest.fixture
def ids(tmp_path: Path) -> Callable[[Any], str]:
    """Writes a JSON value to a file and gives its path."""

    def make(value: Any) -> str:
        path = tmp_path / "ids.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return make


def one_line(called: Called, *said: str) -> None:
    code, out, err = called
    assert (code, out) == (2, ""), called
    assert err.startswith("dllm-bench: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for word in said:
        assert word in err, err


BAD: list[tuple[list[str], list[str]]] = [
    (["--gen-length", "10", "--block-length", "4"], ["gen_length 10", "nearest valid gen_length is 8 or 12"]),
    (["--gen-length", "4", "--block-length", "8"], ["nearest valid gen_length is 8", "block_length 4"]),
    (["--gen-length", "8", "--block-length", "1000000000000"], ["block_length 8"]),
    (["--gen-length", "0"], ["gen_length", "nearest valid: 1"]),
    (["--gen-length", "-5"], ["gen_length", "nearest valid: 1"]),
    (["--block-length", "0"], ["block_length", "nearest valid: 1"]),
    (["--gen-length", "8", "--block-length", "4", "--steps", "5"], ["steps 5", "2 blocks", "nearest valid is 4"]),
    (["--gen-length", "8", "--steps", "0"], ["steps", "nearest valid: 1"]),
    (["--threshold", "-0.1"], ["threshold", "nearest valid: 0"]),
    (["--threshold", "nan"], ["threshold", "finite"]),
    (["--factor", "-1"], ["factor", "nearest valid: 0"]),
    (["--threshold", "0.9", "--factor", "1"], ["--threshold and --factor exclude each other"]),
    (["--threshold", "0.9", "--tokens-per-pass", "1"], ["exclude each other"]),
    (["--tokens-per-pass", "0"], ["tokens_per_pass", "nearest valid: 1"]),
    (["--remasking", "randon"], ["did you mean 'random'", "low_confidence"]),
    (["--remasking", "random", "--threshold", "0.9"], ["--remasking random"]),
    (["--temperature", "-1"], ["temperature", "nearest valid: 0"]),
    (["--cfg-scale", "-1"], ["cfg_scale", "nearest valid: 0"]),
    (["--cfg-scale", "inf"], ["cfg_scale", "finite"]),
    (["--alg", "entropi"], ["did you mean 'entropy'"]),
    (["--alg", "entropy", "--threshold", "0.9"], ["confidence_threshold"]),
    (["--alg", "entropy", "--factor", "1"], ["--factor"]),
    (["--alg", "confidence_threshold", "--gen-length", "8", "--steps", "3"], ["does not divide", "nearest valid is 2"]),
    (["--top-p", "0.9"], ["--top-p belongs to Dream's schedules"]),
    (["--top-p", "0"], ["top_p", "above 0"]),
    (["--eps", "2"], ["eps", "nearest valid: 1"]),
    (["--seed", "-1"], ["seed", "nearest valid: 0"]),
    (["--seed", str(2**64)], ["seed", str(2**63 - 1)]),
    (["--fill", "3"], ["START:END"]),
    (["--fill", "3:x"], ["START:END"]),
    (["--fill", "2:1"], ["START < END"]),
    (["--fill", "0:99"], ["nearest valid end is 4"]),
    (["--fill", "0:4"], ["covers the whole prompt"]),
    (["--fill", "0:2", "--gen-length", "8"], ["nearest valid is 2"]),
    (["--confidence-dtype", "float23"], ["confidence_dtype", "did you mean 'float64'"]),
    (["--dtype", "float23"], ["unknown dtype 'float23': did you mean 'float32'"]),
    (["--device", "cuda1"], ["unknown device 'cuda1': did you mean 'cuda'"]),
    (["--device", "gpu"], ["unknown device 'gpu'", "cpu"]),
    (["--rope-scaling", "nkt:2"], ["did you mean 'ntk:13.6'"]),
    (["--chat-template", "lada"], ["did you mean 'llada'"]),
    (["--method", "fast_dlm"], ["did you mean 'fast_dllm'"]),
    (["--method", "baseline", "--set", "mode=dual"], ["belongs to method 'fast_dllm'"]),
    (["--method", "baseline", "--set", "nothing=1"], ["no options"]),
    (["--set", "modee=dual"], ["did you mean 'mode'"]),
    (["--set", "mode=duall"], ["did you mean 'dual'"]),
    (["--set", "mode"], ["--set needs key=value"]),
    (["--set", "mode=prefix", "--set", "step_cap=true"], ["step_cap=true needs mode=dual"]),
    (["--set", "step_cap=maybe"], ["true or false"]),
    (["--trace"], ["--trace needs --json"]),
    (["--prompt", "both"], ["either --prompt TEXT or --prompt-ids"]),
    (["--gen-lenght", "8"], ["unknown option '--gen-lenght': did you mean '--gen-length'"]),
    (["--gen-length", "abc"], ["--gen-length must be a whole number (nearest valid: 1), got 'abc'"]),
    (["--gen-length=12.7"], ["--gen-length must be a whole number (nearest valid: 13), got '12.7'"]),
    (["--threshold", "high"], ["--threshold must be a number (nearest valid: 0), got 'high'"]),
    (["--top-p", "7x"], ["--top-p must be a number (nearest valid: 1), got '7x'"]),
    (["--gen-length"], ["--gen-length", "requires an argument"]),
    (["surplus"], ["surplus"]),
]


@pytest.mark.parametrize(("args", "said"), BAD, ids=lambda v: " ".join(v)[:50])
def test_mistakes(args: list[str], said: list[str], call: Call, ids: Callable[[Any], str]) -> None:
    one_line(call("generate", "--model", LLADA, "--prompt-ids", ids([1, 2, 3, 4]), *args), *said)


def test_mistakes_of_dream(call: Call, ids: Callable[[Any], str]) -> None:
    base = ("generate", "--model", DREAM, "--prompt-ids", ids([1, 2, 3, 4]), "--gen-length", "8")
    one_line(call(*base, "--remasking", "random"), "--alg origin")
    one_line(call(*base, "--threshold", "0.9", "--steps", "3", "--method", "baseline"), "nearest valid is 2")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "prompt is empty"),
        ([[]], "prompt is empty"),
        ([[1], []], "prompt is empty"),
        ([1, 130, 2], "mask id 130 at position 1"),
        ([1, -1], "-1 at position 1 is outside the vocabulary: nearest valid is 0"),
        ([1, 131], "nearest valid is 130"),
        ([10**30], "outside the vocabulary"),
        ("[" + "1" * 5000 + "]", "not JSON"),
        ([1.5], "whole numbers"),
        ([True], "whole numbers"),
        (["1"], "whole numbers"),
        ([[1], 2], "whole numbers"),
        ([[[1]]], "whole numbers"),
        ({"ids": [1]}, "whole numbers"),
        (None, "whole numbers"),
        ("", "not JSON"),
        ("1 2 3", "not JSON"),
        ("[1,", "not JSON"),
        ("[NaN]", "whole numbers"),
        ("[" * 100_000, "not JSON"),
    ],
)
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_bad_ids(source: str, value: Any, said: str, call: Call, ids: Callable[[Any], str]) -> None:
    path = ids(value)
    base = ("generate", "--model", LLADA, "--gen-length", "4", "--prompt-ids")
    if source == "file":
        one_line(call(*base, path), said)
    else:
        one_line(call(*base, "-", stdin=Path(path).read_text()), said)


def test_bad_files(call: Call, tmp_path: Path) -> None:
    base = ("generate", "--model", LLADA, "--gen-length", "4", "--prompt-ids")
    one_line(call(*base, str(tmp_path / "none.json")), "none.json")
    one_line(call(*base, str(tmp_path)), str(tmp_path))
    one_line(call(*base, "[1, 2, 3]"), "takes a file, or -")
    one_line(call(*base, "[" + "1, " * 500 + "1]"), "takes a file, or -")
    one_line(call(*base, "x" * 5000), "cannot read")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe[1]")
    one_line(call(*base, str(tmp_path / "bytes.json")), "bytes.json is not JSON")


def test_no_prompt_no_command_no_model(call: Call) -> None:
    one_line(call("generate", "--model", LLADA), "either --prompt TEXT or --prompt-ids FILE")
    one_line(call("generate", "--model", LLADA, "--prompt", " \n"), "prompt is empty")
    one_line(call("generate", "--model", LLADA, "--prompt", "text"), "has no tokenizer.json")
    one_line(call("generate", "--model", "lada-8b-base", "--prompt", "x"), "did you mean 'llada-8b-base'")
    one_line(call("generate", "--model", LLADA + "x", "--prompt", "x"), "nearest there", "llada_fastdllm")
    one_line(call("generat"), "generate")
    one_line(call("--versoin"), "did you mean '--version'")
    one_line(call("list", "method"), "did you mean 'methods'")
    one_line(call("list"), "KIND" if "KIND" in call("list")[2] else "methods")
    one_line(call("show", "fast_dlm"), "did you mean 'fast_dllm'")
    one_line(call("list", "methods", "--all"), "unknown option '--all'")
    code, out, err = call()
    assert code == 2 and out == "" and "generate" in err and err.startswith("Usage")


def test_no_cuda_here(call: Call, ids: Callable[[Any], str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    one_line(call("generate", "--model", LLADA, "--prompt-ids", ids([1]), "--device", "cuda:0"), "nearest valid: cpu")


JSON_KEYS = ["output_ids", "nfe", "dense_passes", "row_layers", "masks_left", "useful_tokens", "text"]
RUN = ("generate", "--model", LLADA, "--gen-length", "8", "--block-length", "4", "--threshold", "0.9")


def test_json_has_the_documented_fields(call: Call, ids: Callable[[Any], str]) -> None:
    code, out, err = call(*RUN, "--prompt-ids", ids([5, 6, 7]), "--json")
    assert (code, err) == (0, "") and out.count("\n") == 1
    found = json.loads(out)
    assert list(found) == JSON_KEYS
    wanted = generate(model("llada_fastdllm"), [5, 6, 7], decode={"gen_length": 8, "block_length": 4, "threshold": 0.9})
    assert found == wanted.as_json() and found["text"] is None and len(found["output_ids"]) == 8


def test_json_of_several_and_of_a_list_of_one(call: Call) -> None:
    _, out, _ = call(*RUN, "--prompt-ids", "-", "--json", stdin="[[5, 6, 7], [8]]")
    several = json.loads(out)
    assert isinstance(several, list) and [list(one) for one in several] == [JSON_KEYS, JSON_KEYS]
    _, out, _ = call(*RUN, "--prompt-ids", "-", "--json", stdin=" [[5, 6, 7]]\n")
    assert json.loads(out) == several[:1]
    _, out, _ = call(*RUN, "--prompt-ids", "-", "--json", stdin="[5, 6, 7]")
    assert json.loads(out) == several[0]
    _, out, _ = call(*RUN, "--prompt-ids", "-", stdin="[[5, 6, 7], [8]]")
    assert [json.loads(line) for line in out.splitlines()] == [one["output_ids"] for one in several]


@pytest.mark.parametrize(
    "args",
    [("--method", "baseline"), ("--method", "fast_dllm", "--set", "mode=prefix"), ("--set", "fast_dllm.mode=dual")],
)
def test_trace(args: tuple[str, ...], call: Call, ids: Callable[[Any], str]) -> None:
    code, out, err = call(*RUN, "--prompt-ids", ids([5, 6, 7]), "--json", "--trace", "--no-eos-stop", *args)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == [*JSON_KEYS, "passes"] and len(found["passes"]) == found["nfe"]
    for one in found["passes"]:
        assert list(one) == ["kind", "rows", "committed", "method"]
        assert one["kind"] in ("dense", "partial") and (one["rows"] == 11) == (one["kind"] == "dense")
        assert all(found["output_ids"][p - 3] == token for p, token in one["committed"])
    assert sum(len(p["committed"]) for p in found["passes"]) == 8
    assert found["dense_passes"] == sum(p["kind"] == "dense" for p in found["passes"])
    assert found["row_layers"] == 4 * sum(p["rows"] for p in found["passes"])


def test_every_flag_reaches_the_decoder(call: Call, ids: Callable[[Any], str]) -> None:
    base = ("generate", "--model", DREAM, "--prompt-ids", ids([5, 6, 7]), "--json", "--gen-length", "8")
    args = (
        "--alg",
        "entropy",
        "--steps",
        "4",
        "--temperature",
        "0.7",
        "--top-p",
        "0.9",
        "--top-k",
        "20",
        "--seed",
        "3",
    )
    more = (
        "--alg-temp",
        "0.5",
        "--eps",
        "0.01",
        "--cfg-scale",
        "0.5",
        "--confidence-dtype",
        "float64",
        "--no-eos-stop",
    )
    code, out, _ = call(*base, *args, *more, "--method", "baseline", "--dtype", "float64")
    decode: dict[str, Any] = {"gen_length": 8, "alg": "entropy", "steps": 4, "temperature": 0.7, "top_p": 0.9}
    decode |= {"top_k": 20, "seed": 3, "alg_temp": 0.5, "eps": 0.01, "cfg_scale": 0.5}
    decode |= {"confidence_dtype": "float64", "eos_stop": False}
    wanted = generate(model("dream_fastdllm", "float64"), [5, 6, 7], "baseline", {}, decode)
    assert code == 0 and json.loads(out) == wanted.as_json()


def test_fill(call: Call, ids: Callable[[Any], str]) -> None:
    base = ("generate", "--model", LLADA, "--prompt-ids", ids([1, 2, 130, 130, 5, 6]), "--json")
    code, out, err = call(*base, "--fill", "2:4", "--trace")
    found = json.loads(out)
    assert (code, err) == (0, "") and len(found["output_ids"]) == 2 and found["masks_left"] == 0
    assert {p for one in found["passes"] for p, _ in one["committed"]} == {2, 3}


def test_masks_that_are_left_are_said(call: Call, ids: Callable[[Any], str]) -> None:
    args = ("--set", "step_cap=true", "--steps", "2", "--threshold", "2", "--no-eos-stop")
    code, out, err = call(*RUN, "--prompt-ids", ids([1, 2, 3]), *args)
    assert code == 0 and json.loads(out).count(130) == 6
    assert err == "dllm-bench: 6 positions are still masked\n"


def test_beyond_the_nominal_maximum_is_one_warning(call: Call) -> None:
    long = json.dumps([[1] * 600, [2]])
    code, out, err = call(*RUN, "--prompt-ids", "-", "--json", stdin=long)
    assert code == 0 and len(json.loads(out)) == 2
    assert err.count("\n") == 1 and "608 positions are beyond the 512" in err
    one_line(call(*RUN, "--prompt-ids", "-", stdin=json.dumps([*[1] * 600, 130])), "mask id")


def test_text(call: Call, tmp_path: Path) -> None:
    tokenizer = byte_level(LLADA_SPECIALS)
    size = 256 + len(LLADA_SPECIALS)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    mask, eos = (tokenizer.token_to_id(t) for t in ("<|mdm_mask|>", "<|endoftext|>"))
    write(tmp_path, llada_config(vocab_size=size, embedding_size=size, mask_token_id=mask, eos_token_id=eos))
    run = ("generate", "--model", str(tmp_path), "--gen-length", "8", "--prompt")
    for prompt in ("Hello", "Zwölf 🍎 \u202e\u0301", "<|eot_id|>", "x\x00y"):
        code, out, err = call(*run, prompt, "--json")
        assert (code, isinstance(json.loads(out)["text"], str)) == (0, True), err
        code, text, _ = call(*run, prompt)
        assert code == 0 and text == json.loads(out)["text"] + "\n"
    one_line(call(*run, "bytes \udcff that are no text"), "prompt")
    one_line(call(*run, "<|mdm_mask|>"), "mask id")


def test_an_interrupt_is_quiet(call: Call) -> None:
    class Interrupted(io.TextIOWrapper):
        def read(self, *_: Any) -> str:
            raise KeyboardInterrupt

    assert call(*RUN, "--prompt-ids", "-", reader=Interrupted) == (130, "", "")


def test_version_help_and_lists(call: Call) -> None:
    assert call("--version") == (0, f"dllm-bench {dllm_bench.__version__}\n", "")
    for args in (("--help",), ("generate", "--help"), ("-h",)):
        code, out, err = call(*args)
        assert (code, err) == (0, "") and out.startswith("Usage")
    for kind, name in (("methods", "fast_dllm"), ("models", "llada-8b-instruct"), ("tasks", "ruler_niah")):
        code, out, err = call("list", kind)
        assert (code, err) == (0, "") and name in out
    code, out, _ = call("show", "fast_dllm")
    assert code == 0 and "2505.22618" in out and "step_cap" in out and "dual|prefix" in out
    assert call("show", "baseline")[1].endswith("options  none\n")
    assert "alone  means fast_dllm+wavefilter" in call("show", "wavefilter")[1]
    code, out, _ = call("show", "elastic_cache+wavefilter")
    assert code == 0 and "\n\nwavefilter: partial" in out and out.startswith("elastic_cache: ")
    one_line(call("show", "elastic_cache+wavefiltr"), "did you mean 'wavefilter'")
    assert "pinned" in call("show", "dream-7b-base")[1]


def test_an_answer_prefix_belongs_to_a_text(call: Call, ids: Callable[[Any], str]) -> None:
    one_line(call("generate", "--prompt-ids", ids([1, 2]), "--answer-prefix", "It is"), "goes with --prompt")


def test_an_answer_prefix_stands_behind_the_template(call: Call) -> None:
    needle = "One of the special magic numbers for calm-river is: 4718253."
    asked = "What is the special magic number for calm-river mentioned in the provided text?"
    prefix = "The special magic number for calm-river mentioned in the provided text is"
    code, out, _ = call("generate", "--prompt", f"{needle}\n{asked}", "--answer-prefix", prefix)
    assert (code, out.strip()) == (0, "4718253.")


@pytest.mark.parametrize("args", [("show", "fast_dllm"), ("list", "methods"), ("leaderboard",), ("--help",)])
def test_a_reader_that_goes_away_is_no_error(args: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dllm_bench", *args]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": 3}, "unknown method '3'"),
        ({"method": None}, "unknown method 'None'"),
        ({"options": 3}, "options must be a mapping"),
        ({"options": {3: 3}}, "unknown option of method 'fast_dllm': '3'"),
        ({"decode": 3}, "decode must be a mapping"),
        ({"decode": {3: 1}}, "unknown option of decode '3'"),
        ({"span": 3}, "span must be two positions, such as (0, 2), got 3"),
        ({"span": (1, 2, 3)}, "span must be two positions"),
        ({"span": (0, 9)}, "span 0:9 is no range of the prompt's 2 tokens"),
    ],
)
def test_wrong_kinds_of_values_in_python(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        generate(model("llada_fastdllm"), [1, 3], **given)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"spec": 3}, "model must be a name, got 3 (nearest valid: 'tiny')"),
        ({"dtype": 3}, "dtype must be a name, got 3 (nearest valid: 'auto')"),
        ({"device": 0}, "device must be a name, got 0 (nearest valid: 'auto')"),
        ({"chat_template": True}, "chat template must be a name, got True (nearest valid: 'auto')"),
        ({"rope_scaling": 3}, "unknown RoPE scaling '3'"),
    ],
)
def test_wrong_kinds_of_values_for_a_model(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        dllm_bench.load_model(**given)
    assert said in str(refused.value)


def test_none_and_torch_s_own_names_are_understood() -> None:
    import torch

    loaded = dllm_bench.load_model(LLADA, dtype=None, device="cpu", chat_template=None)
    assert loaded.dtype == "float32"
    loaded = dllm_bench.load_model(Path(LLADA), dtype=torch.float64, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert (loaded.name, loaded.dtype) == (LLADA, "float64")


def test_show_wraps_on_a_terminal_only(call: Call) -> None:
    out = call("show", "wavefilter")[1]
    [notes] = [line for line in out.splitlines() if line.startswith("notes  ")]
    assert len(notes) > 200 and "(haar|db2|db4|sym4|coif1)" in out
    out = call("show", "ruler_niah")[1]
    assert "context  --ctx is needed" in out and "metrics  score" in out
