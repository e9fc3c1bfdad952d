"""A tiny random Whisper that real vLLM serves on a CPU, for its calls and not for what it hears.

`python -m tests.vllm.tiny_whisper DIR`, by the Python of the vLLM environment. Everything is made here: a byte-level BPE
vocabulary with Whisper's special tokens, the feature extractor, and two layers of weights.
"""

import json
import sys
from pathlib import Path

from workers.vllm.tiny_model import TRAINING_TEXT

VOCABULARY = 1024
HIDDEN = 64
POSITIONS = 448
LANGUAGES = ("en", "de", "fr")
BEGIN, END = "<|startoftranscript|>", "<|endoftext|>"
TASKS = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
TIMES = tuple(f"<|{at * 0.02:.2f}|>" for at in range(1501))


def write(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    folder.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(TRAINING_TEXT.strip().split("\n\n"), trainer)
    special = [END, BEGIN, *(f"<|{each}|>" for each in LANGUAGES), *TASKS, *TIMES]
    bpe.add_special_tokens(special)
    known = {name: bpe.token_to_id(name) for name in special}
    written = json.loads(bpe.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(written["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(each) for each in written["merges"]))
    tokenizer = WhisperTokenizer(
        vocab=written["vocab"], merges=[tuple(each) for each in written["merges"]], unk_token=END, bos_token=END,
        eos_token=END, pad_token=END, additional_special_tokens=special[1:], model_max_length=POSITIONS,
    )  # fmt: skip
    WhisperProcessor(WhisperFeatureExtractor(), tokenizer).save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    assert len(set(ids.values())) == len(special), (ids[BEGIN], known[BEGIN])
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=len(tokenizer), d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=2 * HIDDEN, decoder_ffn_dim=2 * HIDDEN, max_target_positions=POSITIONS,
        decoder_start_token_id=ids[BEGIN], bos_token_id=ids[END], eos_token_id=ids[END], pad_token_id=ids[END],
        suppress_tokens=[], begin_suppress_tokens=[], dtype="float32",
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():  # no text is of marks of time and tasks alone
        model.model.decoder.embed_tokens.weight[[ids[name] for name in special]] *= 0.01
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder, safe_serialization=True)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
