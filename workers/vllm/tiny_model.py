"""A tiny random Llama that real vLLM serves on a CPU: for tests and first tries, not for its answers.

    python -m workers.vllm.tiny_model DIR

Two layers, hidden size 128, a byte-level BPE vocabulary of 1,024 tokens trained on the text below, and a chat template.
About 2 MB on disk. The same seed writes the same weights. Needs `torch` and `transformers`, which the vLLM environment
(`make vllm`) has; Pilothouse's own environment need not.
"""

import argparse
import sys
from pathlib import Path

VOCABULARY = 1024
HEAD_SIZE = 32
CONTEXT_TOKENS = 4096
BEGIN, END, TURN = "<|begin|>", "<|end|>", "<|turn|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)

# Written for this file: enough different words and digits for 1,024 merges.
TRAINING_TEXT = """
A pilot house is the room from which a ship is steered. It stands high, with windows on all sides, so that the officer of
the watch can see the bow, the sea and the weather. On the desk lie the chart and the log; next to the wheel are the
compass, the engine telegraph and the voice pipe to the engine room. Nothing in it makes the ship go. It is the place
where what is known about the ship, the water and the voyage comes together, and from which orders are given.

A fleet of language model servers has engines too. Each one holds the weights of a model, takes prompts, reads them in a
prefill step and then writes one token after another in decode steps. Its memory holds keys and values of every token of
every request that is running, so the number of requests that it can run at once depends on how long they are. When that
memory is full, something has to give way: a request is stopped, its memory is freed, and later it starts from the
beginning. When too much is asked at once, requests wait, and their senders wait as well.

Some requests are urgent: a person is looking at the screen, and the first word should appear within half a second.
Others may take an hour, or a night, as long as they are done before the morning. Treating them all alike wastes either
money or patience. A good watch keeper sends each request to the engine that will finish it soonest, keeps the order of
the waiting ones open to change, and looks far enough ahead to start another engine before the queue has formed.

How many engines will be needed at 9, at 12 and at 17 o'clock? Yesterday, last week and the weeks before give a hint.
Demand has a daily rhythm and a weekly rhythm, it has trends and bursts, and sometimes it has surprises. A forecast is a
number with an honest margin. A plan weighs the cost of an idle machine against the cost of a broken promise: 1, 2, 3,
4, 5, 6, 7, 8, 9 or 10 machines, in the east, in the centre or in the west, of this kind or that kind.

Which of these questions can be answered by looking at the instruments? How many requests are running, how many are
waiting, how long has the oldest one waited, how full is the memory, how fast do the tokens come? Which of them need a
calculation, and which need judgement? The instruments should say plainly when they do not know. A gauge that shows the
last value for ever, although its wire was cut ten minutes ago, is worse than no gauge at all.

What did the automatic pilot decide, why, and what would have happened otherwise? Every decision should be written in
the log with the time, the reason and the state before and after it. Then it can be read, questioned, replayed with
another policy, and learnt from. That is all the magic there is: see clearly, think ahead, act in time, write it down.

Storms are a good teacher. The captain reduces speed early, warns everybody below deck, closes the doors that can be
closed and keeps enough room to turn. Afterwards the crew compares the barometer's numbers with the wind that really
blew, corrects the tables, repairs what broke, and explains to the newest sailor which signs were visible beforehand.
No sailor becomes experienced by reading alone, yet none who refuses to read becomes so without expensive damage.

Shipping companies also calculate fuel, wages, insurance, harbour dues and penalties for late delivery. Sometimes a
slower voyage is cheaper; sometimes an additional vessel pays for itself within 48 hours. Comparing both requires
measured figures: 15 knots burn 36 tonnes per day, 18 knots burn 62. Guesswork, however confident, cannot replace
measurement, and measurement without thought cannot replace understanding. Passengers judge simply: did it arrive when
it was promised?
"""


def write(directory: Path, seed: int = 0, hidden_size: int = 128, layers: int = 2) -> None:
    """Write config, weights, tokenizer and chat template into *directory* (made if absent, files replaced).

    *hidden_size* is a multiple of 64. Raises ImportError when `torch` or `transformers` is missing.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END, TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TRAINING_TEXT.strip().split("\n\n"), trainer)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, model_max_length=CONTEXT_TOKENS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // HEAD_SIZE,
        num_key_value_heads=hidden_size // HEAD_SIZE // 2,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=bpe.token_to_id(BEGIN),
        eos_token_id=bpe.token_to_id(END),
        tie_word_embeddings=True,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(directory, safe_serialization=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.vllm.tiny_model", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=128, help="a multiple of 64; more makes its steps longer")
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args(arguments)
    try:
        write(options.directory, options.seed, options.hidden_size, options.layers)
    except ImportError as error:
        sys.stderr.write(f"{error}. Run this with the vLLM environment's Python (`make vllm`).\n")
        return 1
    sys.stdout.write(f"Wrote a tiny Llama to {options.directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
