"""Small real tokenizers, one of each kind of decoder, made in a fraction of a second without any download."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Once upon a time there was a little dragon who lived in a cave near the village.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def add(a, b):\n    return a + b\n",
    "  two spaces, then words;   three spaces.",
    "naïve café, Straße, 東京へ行きましょう, 你好世界, Привет мир",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: byte-level BPE, 400 tokens, end of text `<|endoftext|>` (id 0), a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    # An added token that is not special: text of its own, with characters that stand for no byte.
    tokenizer.add_tokens([AddedToken("<tool→>", special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


@cache
def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 2's kind: BPE over text with "▁" for spaces, bytes as `<0xE4>`, one leading space stripped."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["▁", *sorted({c for line in CORPUS for c in line if c.isascii() and c not in " \n"})]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("o", "n"), ("▁", "d"), ("▁", "▁")]
    vocabulary += [left + right for left, right in merges]
    model = models.BPE(
        {token: index for index, token in enumerate(vocabulary)},
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """T5's kind: a unigram model with a Metaspace decoder, which drops the first token's "▁"."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@cache
def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """BERT's kind: words, and pieces that begin with "##"; spaces are only implied."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[SEP]", unk_token="[UNK]")
