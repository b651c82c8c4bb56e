"""The tokenizer against OpenAI's published ids, tiktoken's own pattern and Hugging Face's implementation."""

from pathlib import Path

import pytest
import tiktoken
import tiktoken_ext.openai_public
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tokenizer
from config import UserError

HELLO = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
AWKWARD = " \n\t\r'abZsdmtlre09.,-_é中ß½ⅷ\u00a0\u3000\u0085\u200b\x1c\u0301😀\ufffd\x00"


@pytest.fixture(scope="module")
def hugging_face():
    """GPT-2's tokenizer in the tokenizers library, from the same merges and its own reading of them."""
    lines = tokenizer.MERGES.read_text(encoding="utf-8").splitlines()[1:]
    merges = [tuple(line.split()) for line in lines]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # by code point, which is the order of GPT-2's first 256 ids
    vocab = {token: i for i, token in enumerate(alphabet + [a + b for a, b in merges])}
    hf = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    return hf


@pytest.fixture(scope="module")
def tiktoken_pattern():
    ours = tokenizer.encoding()
    return tiktoken.Encoding("reference", pat_str=tiktoken_ext.openai_public.r50k_pat_str,
                             mergeable_ranks=ours._mergeable_ranks, special_tokens={})


def test_published_ids():
    encoding = tokenizer.encoding()
    assert encoding.encode("Hello, I'm a language model,") == HELLO
    assert encoding.encode("<|endoftext|>", allowed_special="all") == [tokenizer.EOT] == [50256]
    assert encoding.n_vocab == 50257
    assert encoding.encode_ordinary("!") == [0]
    assert encoding.decode([50255]) == " gazed"


def test_hugging_face_reads_the_merges_alike(hugging_face):
    source = Path(__file__).read_text(encoding="utf-8") + Path(tokenizer.__file__).read_text(encoding="utf-8")
    assert tokenizer.encoding().encode_ordinary(source) == hugging_face.encode(source).ids


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet=AWKWARD, max_size=30)))
def test_any_text(hugging_face, tiktoken_pattern, text):
    ids = tokenizer.encoding().encode_ordinary(text)
    assert ids == tiktoken_pattern.encode_ordinary(text) == hugging_face.encode(text).ids
    assert tokenizer.decode(ids) == text


def test_decode_never_fails():
    smile = tokenizer.encoding().encode_ordinary("😀")
    assert len(smile) > 1
    assert tokenizer.decode(smile) == "😀"
    assert tokenizer.decode(smile[:1]).strip("\ufffd") == ""
    assert tokenizer.decode([*HELLO[:1], 50256, 50257, 65535, -1]) == "Hello<|endoftext|>" + "\ufffd" * 3
    assert tokenizer.decode([]) == ""


def test_changed_merges_are_refused(tmp_path, monkeypatch):
    changed = tmp_path / "vocab.bpe"
    changed.write_bytes(tokenizer.MERGES.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(tokenizer, "MERGES", changed)
    with pytest.raises(UserError, match="sha256"):
        tokenizer.encoding.__wrapped__()
    changed.unlink()
    with pytest.raises(UserError, match="No such file"):
        tokenizer.encoding.__wrapped__()
