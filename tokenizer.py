"""The GPT-2 byte-pair tokenizer, offline: OpenAI's merge list in assets/ turned into a `tiktoken.Encoding`."""

import functools
import hashlib
from pathlib import Path

import tiktoken

from config import VOCAB_SIZE, UserError

EOT = 50256  # <|endoftext|>: stands before each document, and starts a sample that has no prompt
MERGES = Path(__file__).parent / "assets" / "vocab.bpe"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# What BPE never merges across: contractions, then letters, digits or anything else with at most one space before
# it, then whitespace, whose last character is left to what follows (Radford et al., 2019). tiktoken's own pattern
# means the same. The group puts all that needs no look-ahead into one automaton: encoding takes 0.6 of the time.
SPLIT = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s++$|\s+(?!\S)|\s"


@functools.cache
def encoding() -> tiktoken.Encoding:
    """GPT-2's encoding: 256 bytes, 50,000 merges, <|endoftext|>. Built once a process (0.1 s).

    Raises:
        UserError: assets/vocab.bpe is missing or is not OpenAI's file.
    """
    try:
        data = MERGES.read_bytes()
    except OSError as error:
        raise UserError(f"{MERGES}: {error.strerror}; it belongs to this project: git checkout {MERGES.name}") from None
    if (found := hashlib.sha256(data).hexdigest()) != MERGES_SHA256:
        raise UserError(f"{MERGES}: sha256 is {found[:12]}…, not {MERGES_SHA256[:12]}…; "
                        "restore it with git (and let git change no line endings)")
    # The file writes each byte as a printable character: printable bytes stand for themselves and get the first
    # ranks, the rest follow in order and are written as the characters from 256 up.
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    tokens = [bytes([b]) for b in printable + others]
    for line in data.decode().splitlines()[1:]:  # the first line is a version
        tokens.append(bytes(byte_of[c] for c in line if c != " "))
    return tiktoken.Encoding("gpt2", pat_str=SPLIT, mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
                             special_tokens={"<|endoftext|>": EOT}, explicit_n_vocab=VOCAB_SIZE)


def decode(ids) -> str:
    """Text of a sequence of token ids. Half a character, or an id outside the vocabulary, becomes U+FFFD."""
    return b"".join(encoding().decode_single_token_bytes(int(i)) if 0 <= int(i) < VOCAB_SIZE else b"\xff"
                    for i in ids).decode("utf-8", errors="replace")
